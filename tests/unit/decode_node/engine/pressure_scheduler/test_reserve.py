"""Which newcomers wait for memory, and what is kept of it for the top tier."""

import math
import time
from types import SimpleNamespace

import pytest
from pressure_steps import LOW, MIDDLE, TOP, expects, full_of_the_lowest
from real_schedulers import BLOCK
from vllm.v1.request import RequestStatus

from decode_node.engine.setup import DecodeSetup
from slo.decode.victims import IMMUNE_AFTER

pytestmark = pytest.mark.slow


def test_a_newcomer_waits_for_the_predicted_peak_and_the_top_tier_does_not_wait_for_the_reserve(stepped):
    engine = stepped(100)
    expects(engine, 400)
    engine.add("a", 400, 400)
    engine.step()
    engine.add("b", 400, 400)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a"]
    engine.add("small", 16, 10)
    engine.step()
    assert "small" not in [request.request_id for request in engine.scheduler.running], "b is before it"
    engine.add("top", 200, 100, tier=TOP)
    engine.step()
    assert "top" in [request.request_id for request in engine.scheduler.running]
    engine.finish()
    assert engine.finished.index("a") < engine.finished.index("b")


def test_one_held_to_a_grammar_waits_for_memory_like_any_other(stepped):
    engine = stepped(100)
    expects(engine, 400)
    engine.add("a", 400, 400)
    engine.step()
    request = engine.add("b", 400, 400)
    engine.scheduler.waiting.remove_request(request)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=object())
    engine.scheduler.skipped_waiting.add_request(request)
    assert "b" not in engine.step().num_scheduled_tokens
    request.structured_output_request = None
    engine.finish()


def test_the_top_tier_starts_within_what_is_kept_for_it_whoever_holds_that(stepped):
    engine = full_of_the_lowest(stepped)
    engine.add("large", 40 * BLOCK, 5, tier=TOP)
    engine.add("small", 3 * BLOCK - 1, 5, tier=MIDDLE)
    engine.step()
    assert not engine.preempted, "neither is within what is kept"
    engine.scheduler.finish_requests("large", RequestStatus.FINISHED_ABORTED)
    engine.add("top", 3 * BLOCK - 1, 5, tier=TOP)
    output = engine.step()
    assert "top" in output.num_scheduled_tokens
    assert "small" in output.num_scheduled_tokens, "what is free now is not kept from it"
    assert [name[:3] for name in engine.preempted] == ["low"]
    engine.finish()


def test_what_lower_tiers_need_next_keeps_no_newcomer_waiting_while_one_of_them_waits_for_its_memory(stepped):
    engine = full_of_the_lowest(stepped)
    while not engine.preempted:
        engine.step()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    kept = engine.scheduler._admission.reserve(time.monotonic()) * 60
    blocks = free - math.ceil(kept)
    assert blocks > 0, "all that is free but what is kept for the top tier"
    assert engine.scheduler._book.parked
    engine.add("middle", blocks * BLOCK - 1, 1, tier=MIDDLE)
    assert "middle" in engine.step().num_scheduled_tokens
    engine.finish()


def test_the_top_tier_starts_within_what_is_kept_for_it_beside_one_stream_that_holds_nearly_all(stepped):
    engine = stepped(60)
    expects(engine, 1)
    engine.add("low", 800, 150, tier=LOW)
    while engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 1:
        engine.step()
    engine.add("top", 3 * BLOCK - 1, 5, tier=TOP)
    assert "top" in engine.step().num_scheduled_tokens
    assert engine.preempted == ["low"]
    engine.finish()


def test_the_top_tier_starts_within_what_is_kept_for_it_while_a_long_prompt_is_computed(stepped):
    engine = stepped(100, chunk=BLOCK)
    expects(engine, 1)
    for number in range(8):
        engine.add(f"low{number}", 60, 200, tier=LOW)
    engine.step()
    prompt = engine.add("long", 50 * BLOCK - 1, 5, tier=LOW)
    view = engine.scheduler._view
    while view.free_blocks > view.next_blocks(prompt, view.max_model_len):
        assert "long" in engine.step().num_scheduled_tokens
    assert not engine.preempted
    engine.add("top", 3 * BLOCK - 1, 5, tier=TOP)
    assert "top" in engine.step().num_scheduled_tokens, "what is free is for the rest of the prompt"
    assert {name[:3] for name in engine.preempted} == {"low"}
    engine.finish()


def test_what_a_long_prompt_of_the_top_tier_still_needs_is_not_room_for_another_newcomer(stepped):
    engine = stepped(100, chunk=BLOCK)
    engine.add("long", 98 * BLOCK - 1, 5, tier=TOP)
    engine.step()
    engine.add("short", BLOCK - 5, 100, tier=TOP)
    engine.step()
    engine.add("next", 2 * BLOCK - 1, 5, tier=TOP)
    assert "next" not in engine.step().num_scheduled_tokens
    assert not engine.preempted
    engine.finish()


def test_one_below_that_lost_its_memory_twice_keeps_nobody_from_what_is_kept_for_the_top_tier(stepped):
    engine = full_of_the_lowest(stepped)
    engine.add("twice", 40 * BLOCK, 5, tier=MIDDLE)
    account = engine.scheduler._book.accounts["twice"]
    account.preemptions_before, account.parked_s = IMMUNE_AFTER, time.monotonic()
    engine.add("top", 3 * BLOCK - 1, 5, tier=TOP)
    engine.add("next", 2 * BLOCK - 1, 5, tier=MIDDLE)
    output = engine.step()
    assert "top" in output.num_scheduled_tokens
    assert "twice" not in output.num_scheduled_tokens
    assert "next" not in output.num_scheduled_tokens, "it would pass the one that waits"
    engine.finish()


def test_one_below_the_top_tier_that_needs_nearly_all_memory_starts_under_a_trickle_of_the_top_tier(stepped):
    engine = stepped(100)
    expects(engine, 30)
    engine.add("top0", 16, 30, tier=TOP)
    engine.step()
    engine.add("big", 1450, 10, tier=MIDDLE)
    engine.add("small", 16, 10, tier=MIDDLE)
    engine.scheduler._book.accounts["big"].arrived_s -= 60
    for number in range(1, 15):
        for _ in range(20):
            engine.step()
        engine.add(f"top{number}", 16, 30, tier=TOP)
        assert f"top{number}" in engine.step().num_scheduled_tokens, "it is within what is kept for it"
        assert f"top{number - 1}" not in engine.finished
    assert engine.finished[:1] == ["top0"]
    assert "big" in engine.finished
    assert "small" in engine.finished
    assert not [name for name in engine.preempted if name.startswith("top")]
    engine.finish()


def test_of_one_tier_alone_nothing_is_kept_and_nothing_is_said_to_be(stepped):
    engine = stepped(24, additional=DecodeSetup({"only": 1.0}).encode())
    engine.add("one", 100, 20, tier="only")
    engine.step()
    assert engine.scheduler._admission.reserve(time.monotonic()) == 0.0
    engine.finish()
