"""One attempt at having a prompt prefilled on another replica.

Owns what the prefill tier is asked for, that an attempt which fails or is left is released there, and when an
answer needs no prefill any more. Where the next attempt goes is `decode_node.requests.placing`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

from ray.serve.llm.openai_api_models import ErrorResponse

from decode_node.prefill_health import PrefillWatch
from decode_node.rendering import LocalReason
from decode_node.requests.underway import Underway
from decode_node.spans import HANDOFF, PREFILL
from sampling.carried import Prefilled, PrefillRequest, first_token, nothing_but_kv
from slo.request import ReplicaId
from telemetry.catalogue import LOCAL_PREFILLS
from telemetry.instruments import Instruments

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from decode_node.prefill_tier import PrefillTier

_NOTHING: Final = Prefilled(None, None, "")
"""For an answer that goes on without a prefill elsewhere."""


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """Has prompts prefilled.

    Attributes:
        tier: Who prefills.
        watch: Notices that a replica has failed.
        instruments: Where prompts are counted that decode computes after all.
    """

    tier: PrefillTier
    watch: PrefillWatch
    instruments: Instruments

    async def attempt(
        self, run: Underway, prompt: Any, params: SamplingParams, *, samples: bool, draws: str
    ) -> Prefilled:
        """One attempt, on the replica that the run's context names.

        Args:
            run: The request; its context names who has prefilled it then.
            prompt: vLLM's `TokensInput`.
            params: As the client wants its answer sampled.
            samples: Whether decode goes on from the token that prefill samples.
            draws: See `PrefillRequest`.

        Raises:
            PrefillFailedError: It has failed, and may be tried elsewhere.
            RefusedError: The prefill replica refuses the request.
        """
        context = run.context
        if run.has_ended:
            return _NOTHING
        if context.local_prefill == LocalReason.LEFT:
            return self._computed_after_all(context.local_prefill)
        asked = _prefill_of(run, prompt, params, samples=samples, draws=draws)
        try:
            asking = replace(context, traceparent=run.call.spans.phase(PREFILL))
            answer = self.tier.prefill(asked, run.call.info, asking)
            prefilled = await self.watch.result(answer, context.prefill_replica)
        except BaseException:
            self.tier.release(context)
            raise
        if isinstance(prefilled, ErrorResponse):
            if run.has_left:
                run.context = replace(context, local_prefill=LocalReason.LEFT.value)
                return self._computed_after_all(run.context.local_prefill)
            raise run.refuse(prefilled)
        run.call.spans.phase(HANDOFF)
        run.context = replace(context, prefill_replica=ReplicaId(prefilled.replica))
        if run.progress.cache is None:
            run.progress.cache = prefilled.cache
        return cast("Prefilled", prefilled)

    def _computed_after_all(self, reason: str) -> Prefilled:
        """Nothing, of a request that decode has had before and computes itself."""
        self.instruments.count(LOCAL_PREFILLS, reason=reason)
        return _NOTHING


def _prefill_of(
    run: Underway, prompt: Any, params: SamplingParams, *, samples: bool, draws: str
) -> PrefillRequest:
    """What to ask the prefill tier for: the KV cache of all but the token that decode computes next."""
    token_ids = prompt["prompt_token_ids"]
    if run.carried is not None:
        token_ids = [*token_ids, *run.carried.token_ids[:-1]]
    how = first_token(params) if samples else nothing_but_kv()
    return PrefillRequest(token_ids, how, prompt.get("cache_salt"), run.adapter, draws, run.progress.digest)
