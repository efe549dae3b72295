"""Blocks that several streams share count once."""

import time

import pytest
from pressure_steps import LOW, TOP, expects
from real_schedulers import BLOCK

pytestmark = pytest.mark.slow


def test_only_blocks_that_a_victim_alone_holds_count(stepped):
    """Two share a long prefix: taking one of them would free next to nothing."""
    engine = stepped(40)
    engine.scheduler._lengths.factor = 0.0  # so that all are admitted, and share
    shared = list(range(50_000, 50_000 + 20 * BLOCK))
    engine.add("first", 0, 150, tokens=[*shared, 1])
    for _ in range(8):
        engine.step()
    engine.add("second", 0, 150, tokens=[*shared, 2])
    engine.add("own", 8 * BLOCK, 150)
    while not engine.preempted:
        engine.step()
    assert engine.preempted[0] == "own"
    engine.finish()


def share_a_prefix(engine, blocks, tops):
    """Streams of the top tier whose prompts begin alike; one of the lowest is beside them."""
    shared = list(range(50_000, 50_000 + blocks * BLOCK))
    for number in range(tops):
        engine.add(f"top{number}", 0, 100, tier=TOP, tokens=[*shared, number])
        for _ in range(blocks * BLOCK // 64 + 2):
            engine.step()
    engine.add("low", 16, 100, tier=LOW)
    engine.step()
    assert len(engine.scheduler.running) == tops + 1
    return shared


def test_a_prefix_that_the_top_tier_shares_counts_once_beside_a_stream_of_a_lower_tier(stepped):
    engine = stepped(100)
    expects(engine, 50)
    shared = share_a_prefix(engine, 40, tops=3)
    engine.add("next", 0, 50, tier=TOP, tokens=[*shared, 99])
    assert "next" in engine.step().num_scheduled_tokens
    engine.finish()


def test_a_newcomer_needs_no_memory_for_a_prefix_that_others_hold(stepped):
    engine = stepped(100)
    expects(engine, 50)
    shared = share_a_prefix(engine, 60, tops=2)
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < 60
    engine.add("next", 0, 50, tier=TOP, tokens=[*shared, 99])
    assert "next" in engine.step().num_scheduled_tokens
    engine.finish()


def full_but_for(engine, blocks, own=0):
    """Three of the lowest tier, whose prompts begin alike and have more blocks each, hold all but so much."""
    expects(engine, 1)
    shared = list(range(50_000, 50_000 + 20 * BLOCK))
    for number in range(3):
        first = 60_000 + 2000 * number
        engine.add(f"low{number}", 0, 300, tier=LOW, tokens=[*shared, *range(first, first + own * BLOCK + 1)])
        for _ in range((20 + own) * BLOCK // 64 + 2):
            engine.step()
    while engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > blocks:
        engine.step()
    assert not engine.preempted
    engine.scheduler._admission._reserve.observe(1.0, time.monotonic())
    return shared


def test_nobody_yields_to_the_top_tier_for_a_prefix_that_others_hold(stepped):
    engine = stepped(300)
    shared = full_but_for(engine, 4, own=80)
    engine.add("top", 0, 1, tier=TOP, tokens=[*shared, 99])
    assert "top" in engine.step().num_scheduled_tokens
    assert not engine.preempted, "all of its 21 blocks are within the 30 that are kept, and one is its own"
    engine.finish()


def test_the_top_tier_starts_within_what_is_kept_for_it_with_what_others_do_not_hold_of_its_prompt(stepped):
    engine = stepped(50)
    shared = full_but_for(engine, 1)
    engine.add("top", 0, 1, tier=TOP, tokens=[*shared, *range(70_000, 70_000 + 3 * BLOCK)])
    assert "top" in engine.step().num_scheduled_tokens
    assert len(engine.preempted) == 1, "three of its blocks are within the five that are kept"
    engine.finish()


def test_the_top_tier_counts_on_no_room_from_blocks_that_lower_streams_share_with_it(stepped):
    engine = stepped(130, chunk=BLOCK)
    expects(engine, 1)
    shared = list(range(50_000, 50_000 + 2 * BLOCK))
    engine.add("low", 0, 100, tier=LOW, tokens=[*shared, 1])
    engine.add("short", 5, 100, tier=TOP)
    for _ in range(3):
        engine.step()
    engine.add("long", 0, 5, tier=TOP, tokens=[*shared, *range(60_000, 60_000 + 120 * BLOCK - 1)])
    engine.step()
    engine.scheduler._admission._reserve.observe(1.0, time.monotonic())
    engine.add("next", 8 * BLOCK - 1, 5, tier=TOP)
    assert "next" not in engine.step().num_scheduled_tokens, "six blocks are free beside the long one's rest"
    assert not engine.preempted
    engine.finish()


def test_what_is_kept_for_the_top_tier_is_what_it_does_not_hold_shared_blocks_counted_once(stepped):
    engine = stepped(1000)
    expects(engine, 50)
    share_a_prefix(engine, 30, tops=4)
    scheduler, now_s = engine.scheduler, time.monotonic()
    held = scheduler._view.distinct_blocks(scheduler.running[:4])
    assert held < 50, "of 128 that they hold one by one"
    kept = scheduler._admission.reserved_tokens(scheduler.running, now_s)
    assert kept == pytest.approx((0.05 * 1000 - held) * BLOCK)
    engine.finish()
