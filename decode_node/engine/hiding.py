"""What vLLM's scheduler sees while it composes a step of a decode engine.

Changes its queues and bounds for as long as that takes, and puts all of it back. Who is hidden is decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import create_request_queue

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


@contextmanager
def hidden(scheduler: Scheduler, left_out: frozenset[str], shown: list[Request] | None) -> Iterator[None]:
    """Let vLLM see neither these running requests nor any waiting ones but those shown; None for all."""
    aside = [request for request in scheduler.running if request.request_id in left_out]
    if aside:
        scheduler.running = [request for request in scheduler.running if request.request_id not in left_out]
    slots = scheduler.max_num_running_reqs
    scheduler.max_num_running_reqs = slots - len(aside)
    others: list[Request] = []
    if shown is not None:
        names = {request.request_id for request in shown}
        others = [request for request in scheduler.waiting if request.request_id not in names]
        scheduler.waiting = create_request_queue(scheduler.policy)
        scheduler.waiting.extend(shown)
    try:
        yield
    finally:
        scheduler.max_num_running_reqs = slots
        scheduler.running += aside
        scheduler.waiting.extend(others)


@contextmanager
def in_chunks(scheduler: Scheduler, chunk_tokens: int | None) -> Iterator[None]:
    """Bound what a step computes of all sequences together beside its streams; None for vLLM's own bounds.

    An engine that cuts no sequence into chunks keeps them, too.
    """
    config, threshold = scheduler.scheduler_config, scheduler.scheduler_config.long_prefill_token_threshold
    tokens = scheduler.max_num_scheduled_tokens
    if chunk_tokens is not None and threshold:
        # All of them together: whoever stands behind them would have nothing of the step.
        prompts = sum([request.is_prefill_chunk for request in scheduler.running])
        config.long_prefill_token_threshold = max(1, chunk_tokens // max(1, prompts))
        others = len(scheduler.running) + len(scheduler.skipped_waiting)
        scheduler.max_num_scheduled_tokens = min(tokens, others + chunk_tokens)
    try:
        yield
    finally:
        config.long_prefill_token_threshold, scheduler.max_num_scheduled_tokens = threshold, tokens
