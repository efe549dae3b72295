"""What is moved to host memory, and when that is forgotten."""

import time

import pytest
from pressure_steps import LOW, knows_steps
from real_schedulers import BLOCK

from kv_transfer.swap.book import SwapBook

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("logprobs", "steps", "by"),
    [(1, 2, "recompute"), (None, 2, "swap"), (1, 12, "swap")],
    ids=["in the midst of its prompt", "that asks for none", "behind its prompt"],
)
def test_log_probabilities_of_half_a_prompt_do_not_survive_in_host_memory(stepped, logprobs, steps, by):
    engine = stepped(60)
    knows_steps(engine, fixed_s=0.001, prompt_s=0.001)
    swaps = engine.scheduler._relief._swaps = SwapBook(100, BLOCK)
    swaps.block_s = 1e-6
    engine.add("other", 16, 50)
    request = engine.add("low", 400, 50, tier=LOW)
    request.sampling_params.prompt_logprobs = logprobs
    for _ in range(steps):
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, time.monotonic())
    assert engine.scheduler._report.figures.preempted == [(LOW, "vllm", by)]
    assert bool(swaps.tokens_of("low")) is (by == "swap")


def test_only_a_reset_that_takes_place_forgets_host_memory_and_nothing_is_moved_there_for_one(stepped):
    engine = stepped(60)
    knows_steps(engine, fixed_s=0.001, prompt_s=0.001)
    scheduler = engine.scheduler
    swaps = scheduler._swaps = scheduler._relief._swaps = SwapBook(100, BLOCK)
    swaps.block_s = 1e-6
    engine.add("stays", 400, 50, tier=LOW)
    request = engine.add("gone", 100, 50, tier=LOW)
    for _ in range(12):
        engine.step()
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    swaps.step()
    kept = swaps.tokens_of("gone")
    assert kept >= 100
    assert not scheduler.reset_prefix_cache(), "a stream runs"
    assert swaps.tokens_of("gone") == kept
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not swaps.tokens_of("gone")
    assert scheduler._report.figures.preempted == [(LOW, "vllm", "swap"), (LOW, "vllm", "recompute")]
    assert swaps.step() is None
    engine.finish()
