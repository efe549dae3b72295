"""Measures on decode what lies between the end of a prefill, its first token, and its KV cache here.

Owns the requests that are measured. What follows from the times is `slo.predict.handoff`'s.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ray.serve.llm.openai_api_models import CompletionRequest

from slo.predict.handoff import HANDOFF_STEPS, HandoffSample

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_TRIES: Final = 3


async def measure_handoff(
    engine: Any, model: str, prefill: DeploymentHandle, backend: Any, tokens: int
) -> HandoffSample:
    """One handoff of a random prompt: all of the way from sending it to prefill's answer, but its prefill.

    That answer has the first token, and the KV cache is pulled after it. Where decode's tokens come all at
    once, as they do to a process that was held up, a step's time is not known, and it is measured again.

    Args:
        engine: The decode replica's started engine.
        model: What requests call the model.
        prefill: The prefill tier.
        backend: Ray Serve LLM's side of the connector, which writes the requests.
        tokens: The prompt's.

    Raises:
        RuntimeError: when an engine refuses the prompt, for example because the model has no room for it and
            `HANDOFF_STEPS` more tokens; or when tokens have come at once each time.
    """
    for _ in range(_TRIES):
        if (sample := await _handoff(engine, model, prefill, backend, tokens)) is not None:
            return sample
    raise RuntimeError(
        f"its {HANDOFF_STEPS} tokens came at once, {_TRIES} times; measure it while nothing else runs there"
    )


async def _handoff(
    engine: Any, model: str, prefill: DeploymentHandle, backend: Any, tokens: int
) -> HandoffSample | None:
    """One of them; None where it shows no step of decode."""
    vocabulary = engine._engine_client.model_config.get_vocab_size()  # noqa: SLF001
    request = CompletionRequest(
        model=model,
        prompt=random.choices(range(vocabulary), k=tokens),  # noqa: S311 - not a secret
        max_tokens=HANDOFF_STEPS,
        ignore_eos=True,
        stream=True,
    )
    asked = request.model_copy(update={"stream": False})
    sent_s = time.monotonic()
    prefilled = await prefill.options(stream=False).timed_prefill.remote(
        backend.prepare_prefill_request(request=asked, peer=None)
    )
    answered_s = time.monotonic()
    if prefilled is None:
        raise RuntimeError("the prefill tier refused it")
    params, prefill_s = prefilled
    decode = request.model_copy(deep=True)
    decode.kv_transfer_params = params
    at_s: list[float] = []
    async for chunk in engine.completions(decode, None):
        if (error := getattr(chunk, "error", None)) is not None:
            raise RuntimeError(error.message)
        if isinstance(chunk, str) and '"text"' in chunk:
            at_s.append(time.monotonic())
    if not (steps := [later - earlier for earlier, later in pairwise(at_s)]):
        return None
    transfer_s = at_s[0] - answered_s - statistics.median(steps)
    return HandoffSample(tokens, answered_s - sent_s - prefill_s, transfer_s)
