"""Streams that leave a decode engine for lack of memory and come back once the prefill tier has their KV.

What the engine has generated is carried over, as after the loss of a replica, but nobody above the engine
notices: vLLM's OpenAI layer gets one answer. The engine ends the request with an output of its own; here
stands what that means, and which requests it may be done to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.sampling_params import RequestOutputKind, SamplingParams

from decode_node.carrying import PRESSURE_SCHEDULER, why_bound
from sampling.carried import Carried, as_sampled

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAY_LEAVE_XARG: Final = "slackserve_may_leave"
"""Tells the engine's scheduler that a request can leave."""
LEFT: Final = "slackserve_left"
"""The `stop_reason` with which the engine lets one go."""


class LeftError(Exception):
    """A request has left its engine; it goes on from `carried`."""

    def __init__(self, carried: Carried) -> None:
        super().__init__(f"left after {len(carried.token_ids)} tokens")
        self.carried = carried


def may_leave(config: VllmConfig, params: SamplingParams) -> bool:
    """Whether a request can leave: all that its engine knows of it can be carried.

    Text that a stop string might begin in is held back by the engine's process, and is not. With a seed,
    others would wait while the generator of vLLM's first model runner is brought to where it was.
    """
    return (
        config.scheduler_config.scheduler_cls == PRESSURE_SCHEDULER
        and config.scheduler_config.stream_interval == 1
        and params.output_kind in {RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY}
        and params.n == 1
        and not params.stop
        and (params.seed is None or config.use_v2_model_runner)
        and params.prompt_logprobs is None
        and why_bound(config, params) is None
    )


def ended_with(completion: Any, word: str) -> bool:
    """Whether an output says that the engine has ended its request so; a client's stop string does not."""
    return bool(completion.finish_reason == "error" and completion.stop_reason == word)


def has_left(completion: Any) -> bool:
    """Whether an output says that its request has left."""
    return ended_with(completion, LEFT)


def as_unended(output: Any) -> Any:
    """An output that ends a request, as if its answer went on: what it brings, and nothing of the end."""
    completion = output.outputs[0]
    completion.finish_reason = completion.stop_reason = None
    output.finished = False
    return output


class Generated:
    """What one attempt at an answer has generated, so that another one can go on from there.

    Args:
        carried: What it went on from.
        params: As the client wants its answer sampled.
    """

    def __init__(self, carried: Carried | None, params: SamplingParams) -> None:
        self._token_ids = [] if carried is None else list(carried.token_ids)
        self._params = params
        self._is_delta = params.output_kind is RequestOutputKind.DELTA

    def take(self, output: Any) -> tuple[bool, LeftError | None]:
        """Note an output of the engine's: whether it brings something, and whether the request has left."""
        completion = output.outputs[0]
        if self._is_delta:
            self._token_ids += completion.token_ids
        if not has_left(completion):
            return True, None
        if not self._is_delta:  # the output has all of it
            return False, LeftError(_all_of(completion, self._params))
        as_unended(output)
        # Tokens that nobody had taken before come with it.
        return bool(completion.token_ids), LeftError(Carried(self._token_ids, is_sent=True))


def _all_of(completion: Any, params: SamplingParams) -> Carried:
    logprobs = None
    if completion.logprobs is not None:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        logprobs = [as_sampled(token, position, params) for token, position in pairs]
    return Carried(list(completion.token_ids), logprobs)
