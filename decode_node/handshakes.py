"""The first pulls of a decode replica: one tiny prefill of each prefill replica, so that NIXL knows them.

Owns how long a replica that starts waits for them, and what is known against it while it can pull from none.
Prefill replicas that come after others are met by their first request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ray.serve.llm.openai_api_models import CompletionRequest
from vllm.exceptions import VLLMServerError

from decode_node.answers import error_in
from decode_node.prefill_tier import PrefillTier
from slo.request import HANDSHAKE_DUE_S
from telemetry import logs

FIRST_S: Final = 600.0
"""A tier that loads a large model takes minutes."""
OTHERS_S: Final = 20.0
WITHOUT_PREFILL_S: Final = 30.0
_RETRY_S: Final = 1.0
_LATER_S: Final = 30.0
"""How often a replica that serves tries again while nothing has been pulled."""


class NothingPulledError(RuntimeError):
    """No prefill replica's KV cache could be pulled; `said` is what the engine says."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"the KV cache of no prefill replica could be pulled (the engine says {said!r}); the log of this "
            "replica's engine has the reason at 'NIXL transfer failure': where that is a compatibility hash, "
            "or sizes that do not match, both tiers need the same engine_kwargs for what shapes the KV "
            "cache, such as attention_config or a speculative_config that is more than ngram; an "
            "AssertionError without a word may be a prefill.tensor_parallel_size above both decode's and the "
            "model's KV heads"
        )


class _Pull(NamedTuple):
    """What became of one; one that neither came nor failed is late, which says nothing of what is configured.

    Attributes:
        came: Whether the KV cache came.
        failure: What the engine said when it did not.
    """

    came: bool = False
    failure: str | None = None


class Handshakes:
    """Has an engine decode one token that each prefill replica has prefilled.

    Args:
        engine: Ray's, of this replica.
        tier: Whose replicas are asked.
        model: Its name.
        backend: Ray's, of the KV connector.

    Attributes:
        failure: That nothing could be pulled for as long as it was tried; None before that, and once
            something could.
    """

    def __init__(self, engine: Any, tier: PrefillTier, model: str, backend: Any) -> None:
        self._engine = engine
        self._tier = tier
        # A token that ended the answer would leave nothing to pull.
        self._request = CompletionRequest(model=model, prompt=" x", max_tokens=1, ignore_eos=True)
        self._prefill = backend.prepare_prefill_request(request=self._request, peer=None)
        self._task: asyncio.Task[None] | None = None
        self._pulled_at_s = -math.inf
        self.failure: NothingPulledError | None = None

    async def begin(self, expected: int, *, needed: bool) -> None:
        """Wait until that many replicas are known, or are not up in time, or hang.

        A decode replica that is replaced while a prefill replica is down must not wait for it, nor for long
        while all are, if it can answer without them. Where none was up, they are met when they come.

        Args:
            expected: How many there are to be.
            needed: Whether nobody is answered without a prefill replica.

        Raises:
            NothingPulledError: when replicas are up, and the KV cache of none comes.
        """
        meeting = asyncio.create_task(self._meet(expected))
        done, _ = await asyncio.wait([meeting], timeout=None if needed else WITHOUT_PREFILL_S)
        if not done:
            logs.event("handshakes_later", level=logging.WARNING, waited_s=WITHOUT_PREFILL_S)
        elif meeting.result():
            return  # otherwise nobody has answered, or all pulls were late
        self._task = asyncio.create_task(self._later(expected, meeting))

    @property
    def has_pulled(self) -> bool:
        """Whether a KV cache has ever come from a prefill replica."""
        return self._pulled_at_s > -math.inf

    def pulled(self) -> None:
        """A KV cache has come from a prefill replica, of whichever request.

        A request's does not end the tries: one whose prompt is cached here whole has nothing to pull.
        """
        self._pulled_at_s, self.failure = time.monotonic(), None

    async def _later(self, expected: int, meeting: asyncio.Task[bool]) -> None:
        """Go on until something has been pulled, as the replica serves; `meeting` has begun."""
        while True:
            try:
                if await meeting:
                    return
            except NothingPulledError as error:
                logs.event("nothing_pulled", level=logging.ERROR, error=str(error))
            except Exception as error:  # noqa: BLE001 - the edge of a task; one that ends meets nobody
                logs.event("handshakes_failed", level=logging.ERROR, error=repr(error)[:300])
            await asyncio.sleep(_LATER_S)
            meeting = asyncio.create_task(self._meet(expected))

    async def _meet(self, expected: int) -> bool:
        """Whether something was pulled from one of so many prefill replicas.

        Once one has answered, it is tried again for a while: others may come, and one that fails may just
        end. One whose pull is late is not waited for any longer.

        Raises:
            NothingPulledError: The KV cache of none that answers comes, nor has one for a request meanwhile.
        """
        began_s = time.monotonic()
        until_s, others_s = began_s + FIRST_S, OTHERS_S if self.failure is None else 0.0
        while True:
            handovers = await self._tier.broadcast("prewarm_prefill", self._prefill, within_s=HANDSHAKE_DUE_S)
            if handovers:
                until_s = min(until_s, time.monotonic() + others_s)
            pulls = [await self._pull(params) for params in handovers]
            failures = [pull.failure for pull in pulls if pull.failure is not None]
            met = len(pulls) - len(failures)
            if came := sum(pull.came for pull in pulls):
                self.pulled()
            if met >= expected or time.monotonic() >= until_s:
                logs.event("handshakes_done", replicas=came, expected=expected)
                if failures and not met and self._pulled_at_s < began_s:
                    self.failure = NothingPulledError(failures[0])
                    raise self.failure
                return came > 0
            await asyncio.sleep(_RETRY_S)

    async def _pull(self, params: Mapping[str, Any]) -> _Pull:
        """Decode a token after a prefill elsewhere."""
        request = self._request.model_copy(deep=True)
        request.kv_transfer_params = dict(params)
        failure, limit = None, asyncio.timeout(HANDSHAKE_DUE_S)
        try:
            async with limit:
                async for piece in self._engine.completions(request, None):
                    if (refused := error_in(piece)) is not None:
                        failure = refused.message
        except TimeoutError:
            return _Pull()
        except VLLMServerError as error:
            failure = str(error)
        if limit.expired():  # vLLM catches the cancellation, and answers with an error
            return _Pull()
        if failure is not None:
            logs.event(
                "handshake_failed",
                level=logging.ERROR,
                engine=params.get("remote_engine_id"),
                host=params.get("remote_host"),
                port=params.get("remote_port"),
                error=failure[:300],
            )
        return _Pull(came=failure is None, failure=failure)
