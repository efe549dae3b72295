"""Streams without an objective are ended at their limits, on vLLM's real scheduler without a model."""

import random
import time

import pytest
from decode_steps import Stepped
from real_schedulers import BLOCK, build

from decode_node.engine.pressure_scheduler import PressureScheduler
from decode_node.engine.setup import DecodeSetup
from decode_node.requests.dropping import DROPPED, MAY_DROP_XARG
from decode_node.requests.leaving import LEFT, MAY_LEAVE_XARG
from slo.decode.victims import IMMUNE_AFTER
from slo.request import JOB_XARG

pytestmark = pytest.mark.slow

LOW, MIDDLE, TOP = "background", "standard", "premium"
MAY = {MAY_DROP_XARG: True}
LIMIT_S = 300.0


@pytest.fixture
def stepped(tiny_model):
    def make(blocks, drop_after_s=LIMIT_S, **options):
        additional = DecodeSetup(drop_after_s=drop_after_s).encode()
        engine = Stepped(build(PressureScheduler, tiny_model, blocks, additional=additional, **options))
        for tier in (LOW, MIDDLE, TOP):  # answers so far were short, so that all are admitted
            for _ in range(40):
                engine.scheduler._lengths.ended(tier, "", 1)
        engine.scheduler._lengths.factor = 1.0
        return engine

    return make


def crowd(engine, **low):
    """Room for two of three at their ends; one of them is of the lowest tier."""
    engine.add("low", 100, 200, tier=LOW, **low)
    for name in ("top", "also"):
        engine.add(name, 100, 80, tier=TOP)
    engine.step()
    assert len(engine.scheduler.running) == 3


def figures(engine):
    return engine.scheduler._report.figures.preempted


def check_nothing_is_left(engine):
    scheduler = engine.scheduler
    for left in ("accounts", "parked", "restoring", "paced", "untimed", "droppable"):
        assert not getattr(scheduler._book, left), left
    assert not scheduler._relief._chosen
    assert not scheduler._leavers.away
    assert not scheduler._last_words._untold


def test_who_lost_its_memory_as_often_as_anybody_may_is_dropped_for_a_higher_tier(stepped):
    engine = stepped(24)
    crowd(engine, **MAY)
    engine.scheduler._book.accounts["low"].preemptions_before = IMMUNE_AFTER
    while "low" not in engine.finished:
        engine.step()
    assert engine.why["low"] == DROPPED
    assert 0 < len(engine.tokens["low"]) < 200
    assert figures(engine) == [(LOW, "immune", "drop")]
    engine.check_blocks()
    engine.finish()
    assert not engine.preempted
    assert [len(engine.tokens[name]) for name in ("top", "also")] == [80, 80]
    assert engine.finished.count("low") == 1
    check_nothing_is_left(engine)


def test_nobody_is_dropped_for_the_rest_of_a_long_prompt_beside_which_the_top_tier_starts(stepped):
    engine = stepped(100, chunk=BLOCK)
    book = engine.scheduler._book
    for number in range(8):
        engine.add(f"low{number}", 5 * BLOCK + 1, 200, tier=LOW, **MAY)
        book.accounts[f"low{number}"].preemptions_before = IMMUNE_AFTER
    for _ in range(6):
        engine.step()
    engine.add("long", 48 * BLOCK - 1, 5, tier=TOP)
    engine.step()
    engine.scheduler._admission._reserve.observe(1.0, time.monotonic())
    engine.add("top", 6 * BLOCK - 1, 5, tier=TOP)
    output = engine.step()
    assert {"long", "top"} <= output.num_scheduled_tokens.keys()
    assert [name[:3] for name in engine.preempted] == ["low"], "six blocks are enough"
    assert not engine.why
    engine.finish()
    check_nothing_is_left(engine)


@pytest.mark.parametrize(
    ("before", "more"), [(IMMUNE_AFTER, {}), (IMMUNE_AFTER - 1, MAY)], ids=["may not", "not yet"]
)
def test_others_lose_their_memory_and_get_it_back(stepped, before, more):
    engine = stepped(24)
    crowd(engine, **more)
    engine.scheduler._book.accounts["low"].preemptions_before = before
    engine.finish()
    assert engine.preempted == ["low"]
    assert len(engine.tokens["low"]) == 200
    assert [by for *_, by in figures(engine)] == ["recompute"]
    check_nothing_is_left(engine)


def parked(engine, **low):
    """The low one has lost its memory, and the others leave no room for it yet."""
    crowd(engine, **low)
    while not engine.preempted:
        engine.step()
    assert engine.preempted == ["low"]
    for _ in range(3):
        engine.step()
    assert "low" in engine.scheduler._book.parked


def test_who_has_waited_for_its_memory_for_longer_than_the_limit_is_dropped(stepped):
    engine = stepped(24)
    parked(engine, **MAY)
    engine.scheduler._book.accounts["low"].parked_s -= LIMIT_S
    emitted = len(engine.tokens["low"])
    engine.step()
    assert engine.why == {"low": DROPPED}
    assert len(engine.tokens["low"]) == emitted
    assert figures(engine) == [(LOW, "cost", "recompute"), (LOW, "parked", "drop")]
    assert "low" not in engine.scheduler.requests
    engine.finish()
    assert sorted(engine.finished) == ["also", "low", "top"]
    check_nothing_is_left(engine)


@pytest.mark.parametrize(
    ("limit_s", "more"), [(LIMIT_S, {}), (None, MAY)], ids=["promised something", "no limit"]
)
def test_others_wait_for_as_long_as_it_takes(stepped, limit_s, more):
    engine = stepped(24, limit_s)
    parked(engine, **more)
    engine.scheduler._book.accounts["low"].parked_s -= 100 * LIMIT_S
    engine.finish()
    assert len(engine.tokens["low"]) == 200
    assert [by for *_, by in figures(engine)] == ["recompute"]
    check_nothing_is_left(engine)


def test_one_that_has_left_and_found_no_room_when_it_was_back_does_not_try_again(stepped):
    engine = stepped(50)
    times = engine.scheduler._times
    times.fixed_s, times._prompt_s, times._steps = 0.001, 0.001, 100
    times.observe = lambda shape, seconds: None
    engine.add("low", 100, 300, tier=LOW, **{MAY_LEAVE_XARG: True, JOB_XARG: "job", **MAY})
    for number in range(3):
        engine.add(f"top{number}", 100, 250, tier=TOP)
    while "low" not in engine.finished:
        engine.step()
    assert engine.why["low"] == LEFT, "one more is dropped at its limit only"
    emitted = len(engine.tokens["low"])
    engine.add("back", 100 + emitted, 300 - emitted, tier=LOW, **{JOB_XARG: "job", **MAY})
    account = engine.scheduler._book.accounts["back"]
    account.pulls = True
    account.parked_s -= LIMIT_S
    engine.step()
    assert engine.why["back"] == DROPPED
    assert not engine.scheduler._leavers.away
    engine.finish()
    check_nothing_is_left(engine)


def test_the_last_one_that_is_dropped_is_told_so(stepped):
    engine = stepped(24)
    parked(engine, **MAY)
    for name in ("top", "also"):
        engine.scheduler.requests[name].max_tokens = len(engine.tokens[name]) + 1
    engine.scheduler._admitted = lambda now_s: []
    engine.step()
    assert list(engine.scheduler.requests) == ["low"]
    engine.scheduler._book.accounts["low"].parked_s -= LIMIT_S
    engine.step()
    assert engine.why["low"] == DROPPED
    assert not engine.scheduler.requests


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_each_ends_once_with_all_its_tokens_or_the_word_for_it(stepped, seed):
    rng = random.Random(seed)
    engine = stepped(rng.choice([30, 40]), 0.0, max_num_seqs=rng.choice([8, 64]))
    asked = {}
    for number in range(60):
        name, tier = f"r{number}", rng.choice([LOW, LOW, MIDDLE, TOP])
        asked[name] = rng.randrange(1, 250), tier == LOW and rng.random() < 0.7
        more = MAY if asked[name][1] else {}
        engine.add(name, rng.randrange(1, 200), asked[name][0], tier=tier, **more)
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.finish()
    assert sorted(engine.finished) == sorted(asked)
    dropped = {name for name, why in engine.why.items() if why == DROPPED}
    assert dropped, "nobody was dropped"
    assert all(asked[name][1] for name in dropped)
    for name, (tokens, _) in asked.items():
        assert (len(engine.tokens[name]) == tokens) is (name not in dropped), name
    assert [by for *_, by in figures(engine)].count("drop") == len(dropped), "each is counted once"
    check_nothing_is_left(engine)
