"""vLLM's schedulers, with requests that go on from tokens generated elsewhere.

They run in the EngineCore process of a decode replica. The connector pulls the KV cache of the prompt, and
the request is then one that has generated its carried tokens and computes the last of them next. It is the
same whether or not a step is composed while the one before it still runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sampling.carried import Carried

if TYPE_CHECKING:
    from vllm.v1.request import Request


class CarryingScheduler(Scheduler):  # type: ignore[misc] # vLLM ships no types for it
    """`scheduler_cls` of a decode replica."""

    def add_request(self, request: Request) -> None:
        """Queue a request with what has been generated of it."""
        if (carried := Carried.of(request.sampling_params)) is not None:
            request.append_output_token_ids(carried.token_ids)
            if len(carried.token_ids) > 1:
                # vLLM counts no more cached tokens than the prompt has; more can be cached, or pulled, here.
                request.prefill_stats = None
        super().add_request(request)


class AsyncCarryingScheduler(CarryingScheduler, AsyncScheduler):  # type: ignore[misc] # the same
    """`scheduler_cls` of a decode replica that composes a step while the one before it runs."""
