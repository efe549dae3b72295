"""Carried tokens in the replica process of a decode replica: whose may be, and their way to the client.

Wraps one method of one object: where vLLM's output processor takes a request in. The carried tokens are
processed there as if the engine had just generated them, so that text, pieces, stop strings, logprobs
and counts are vLLM's own.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from sampling.carried import Carried, TokenLogprobs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

SCHEDULER = "decode_node.scheduler.CarryingScheduler"
ASYNC_SCHEDULER = "decode_node.scheduler.AsyncCarryingScheduler"
PRESSURE_SCHEDULER = "decode_node.engine.pressure_scheduler.PressureScheduler"
WORKERS = {
    "cpu": "decode_node.worker.cpu.CarryingCPUWorker",
    "cuda": "decode_node.worker.cuda.CarryingGPUWorker",
}


class BoundReason(enum.StrEnum):
    """Why a stream cannot go on on another decode replica once it has begun; the values label metrics."""

    ENGINE = "engine"
    """The engine has another scheduler or worker, decodes speculatively, or returns routed experts."""
    GRAMMAR = "grammar"
    """A grammar constrains the answer; its state is not carried."""
    LOGPROB_TOKENS = "logprob_tokens"
    """Log-probabilities of named tokens are asked for."""
    THINKING_BUDGET = "thinking_budget"
    """The tokens of a train of thought are counted."""
    PARSER = "parser"
    """A parser of tool calls or of reasoning reads the answer; its state is not carried."""
    ECHO = "echo"
    """The last message of a chat is repeated before the answer."""


class ResampledReason(enum.StrEnum):
    """Why decode samples a first token again that prefill has sampled; the values label metrics."""

    ENGINE = "engine"
    """The engine has another scheduler or worker, decodes speculatively, or returns routed experts."""
    GRAMMAR = "grammar"
    """A grammar constrains the answer; its state is not carried."""
    LOGPROB_TOKENS = "logprob_tokens"
    """Log-probabilities of named tokens are asked for."""
    THINKING_BUDGET = "thinking_budget"
    """The tokens of a train of thought are counted."""
    SEED = "seed"
    """With a seed the engines of both tiers draw otherwise: vLLM's two model runners do."""


def why_resampled(config: VllmConfig, params: SamplingParams) -> ResampledReason | None:
    """What keeps the first token of a request from being carried; None for nothing."""
    bound = why_bound(config, params)
    return None if bound is None else ResampledReason(bound.value)


def why_bound(config: VllmConfig, params: SamplingParams) -> BoundReason | None:
    """What keeps the engine from going on with a request from several carried tokens; None for nothing."""
    reasons = {
        BoundReason.ENGINE: not _carries(config),
        BoundReason.GRAMMAR: params.structured_outputs is not None,
        BoundReason.LOGPROB_TOKENS: params.logprob_token_ids is not None,
        BoundReason.THINKING_BUDGET: params.thinking_token_budget is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _carries(config: VllmConfig) -> bool:
    """Whether the engine takes up carried tokens."""
    return (
        config.scheduler_config.scheduler_cls in {SCHEDULER, ASYNC_SCHEDULER, PRESSURE_SCHEDULER}
        and config.parallel_config.worker_cls in WORKERS.values()
        and config.speculative_config is None
        and not config.model_config.enable_return_routed_experts
    )


def deliver_carried(processor: Any) -> None:
    """Have vLLM's `OutputProcessor` deliver what requests bring along, before the engine sees them."""
    take_in = processor.add_request

    def add_request(
        request: Any, prompt: str | None, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        take_in(request, prompt, parent_req, request_index, queue)
        if (carried := Carried.of(request.sampling_params)) is not None:
            _deliver(processor, request, queue, carried)

    processor.add_request = add_request


def _deliver(processor: Any, request: Any, queue: Any, carried: Carried) -> None:
    reason = carried.finish_reason
    output = EngineCoreOutput(
        request.request_id,
        list(carried.token_ids),
        new_logprobs=None if request.sampling_params.logprobs is None else _as_lists(carried),
        finish_reason=None if reason is None else FinishReason[reason.upper()],
        stop_reason=carried.stop_reason,
    )
    traces, processor.tracing_enabled = processor.tracing_enabled, False
    try:  # a request that ends here has no times in this engine, which vLLM's span would tell
        processor.process_outputs([output])
    finally:
        processor.tracing_enabled = traces
    state = processor.request_states.get(request.request_id)
    if state is None:  # it is complete; the engine only frees what waits for it
        request.abort_immediately = True
        return
    state.is_prefilling = True  # vLLM takes the number of cached tokens from the engine's first output
    if carried.is_sent:
        queue.get_nowait()


def _as_lists(carried: Carried) -> LogprobsLists:
    """As the engine gives them; where none are carried the client has them, and only the tokens count."""
    logprobs = carried.logprobs or [TokenLogprobs([token], [0.0], 1) for token in carried.token_ids]
    return LogprobsLists(
        np.array([one.token_ids for one in logprobs]),
        np.array([one.logprobs for one in logprobs], dtype=np.float32),
        np.array([one.rank for one in logprobs]),
    )
