"""Whose memory was taken comes back: when, in which order, and how fast it is computed again."""

import time

import msgspec
import pytest
from pressure_steps import LOW, TOP, expects, knows_steps, one_has_lost_its_memory
from vllm.v1.request import RequestStatus

from sampling.carried import CARRIED_XARG, Carried
from slo.request import DECODE_SINCE_XARG, SEARCH_STEP_XARG

pytestmark = pytest.mark.slow


def test_a_sequence_is_computed_again_in_chunks_that_the_tightest_pace_bears(stepped):
    engine = stepped(34, chunk=256)
    knows_steps(engine, prompt_s=0.001)
    expects(engine, 1)
    engine.add("top", 64, 220, tier=TOP, tpot_s=0.064)
    for name in ("x", "y"):
        engine.add(name, 160, 160, tier=LOW)
    while not engine.preempted:
        engine.step()
    seen = len(engine.outputs)
    engine.finish()
    restoring = set(engine.preempted)
    for output in engine.outputs[seen:]:
        if "top" in output.num_scheduled_tokens:
            chunks = [output.num_scheduled_tokens.get(name, 0) for name in restoring]
            assert sum(n for n in chunks if n > 1) <= 32, "half of 64 ms, at 1 ms a token"
    assert engine.scheduler._report.figures.recomputed_tokens > 0
    assert len(engine.scheduler._report.figures.restored) == len(engine.preempted)


def test_only_who_has_a_token_in_the_step_bounds_what_is_computed_again_beside_it(stepped):
    engine = stepped(500, chunk=256)
    knows_steps(engine, prompt_s=0.001)
    pace = engine.scheduler._pace
    engine.add("free", 16, 100, tier=LOW)
    for _ in range(2):
        engine.step()
    engine.add("waits", 16, 100, tier=LOW, tpot_s=0.02)
    assert pace.chunk_tokens() == 256
    engine.scheduler.finish_requests("waits", RequestStatus.FINISHED_ABORTED)
    engine.add("computes", 1500, 100, tier=LOW, tpot_s=0.02)
    engine.step()
    assert pace.chunk_tokens() == 256, "its own prompt is computed"
    engine.add("decodes", 16, 100, tier=LOW, tpot_s=0.064)
    for _ in range(2):
        engine.step()
    assert pace.chunk_tokens() == 32
    running = engine.scheduler.running
    assert pace.beside(running, 0.0).prompt_tokens == 256, "nobody has lost anything"
    engine.scheduler._book.parked.add("decodes")
    assert pace.beside(running, 0.0).prompt_tokens == 32
    engine.scheduler._book.parked.clear()
    engine.finish()


def test_those_for_whose_ends_there_is_no_room_yet_wait(stepped):
    engine = stepped(30)
    expects(engine, 100)
    for name in ("a", "b", "c"):
        engine.add(name, 140, 100)
    engine.step()
    assert len(engine.scheduler.waiting) == 2
    engine.finish()
    assert engine.preempted == []


def test_whose_memory_was_taken_comes_back_before_newcomers_of_its_tier(stepped):
    engine = stepped(24)
    victim = one_has_lost_its_memory(engine, 100)
    engine.add("new", 100, 10)
    started = []
    while len(started) < 2:
        output = engine.step()
        for name in (victim, "new"):
            if name in output.num_scheduled_tokens and name not in started:
                started.append(name)
    assert started[0] == victim
    engine.finish()


def waited_for(stepped):
    """An engine that is full, and that a newcomer waits for."""
    engine = stepped(24)
    expects(engine, 1)
    engine.add("full", 300, 20)
    engine.step()
    engine.add("new", 200, 10)
    return engine


def test_one_whose_kv_was_not_pulled_keeps_its_place_and_its_pace_counts_from_the_same_token(stepped):
    engine = waited_for(stepped)
    now_s = time.monotonic()
    carried = msgspec.to_builtins(Carried([0], is_sent=True))
    again = engine.add(
        "again", 200, 10, tpot_s=0.1, **{DECODE_SINCE_XARG: now_s - 10.0, CARRIED_XARG: carried}
    )
    waits = engine.scheduler._view.parked(again, now_s)
    assert (waits.is_newcomer, waits.since_s) == (True, now_s - 10.0)
    assert waits.credit_s == pytest.approx(-10.0)
    while not (started := {"new", "again"}.intersection(engine.step().num_scheduled_tokens)):
        assert engine.scheduler.requests
    assert started == {"again"}
    engine.finish()


def test_a_later_step_of_a_search_has_the_place_of_the_first_and_waits_for_no_first_token(stepped):
    engine = waited_for(stepped)
    book, since_s = engine.scheduler._book, time.monotonic() - 10.0
    for name, is_later in (("first", False), ("later", True)):
        engine.add(name, 200, 1, **{DECODE_SINCE_XARG: since_s, SEARCH_STEP_XARG: is_later})
    assert (book.accounts["first"].first_s, book.accounts["later"].first_s) == (None, since_s)
    assert book.untimed.intersection({"first", "later"}) == {"first"}
    while not (started := {"new", "first", "later"}.intersection(engine.step().num_scheduled_tokens)):
        assert engine.scheduler.requests
    assert "new" not in started
    engine.finish()


def test_a_later_step_of_a_search_has_waited_since_it_came_itself(stepped):
    engine, now_s = waited_for(stepped), time.monotonic()
    later = engine.add("later", 200, 1, **{DECODE_SINCE_XARG: now_s - 60.0, SEARCH_STEP_XARG: True})
    waits = engine.scheduler._view.parked(later, now_s)
    assert now_s <= waits.since_s <= time.monotonic()
    assert waits.since_s - waits.ahead_s == pytest.approx(now_s - 60.0)
    engine.finish()


def test_of_those_whose_memory_was_taken_the_one_that_is_least_ahead_now_comes_first(stepped):
    engine = stepped(500)
    for name in ("long_ago", "just_now"):
        engine.add(name, 16, 100, tpot_s=1.0)
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler
    for name, due_s, parked_s in (("long_ago", 950.0, 900.0), ("just_now", 1010.0, 999.0)):
        request, account = scheduler.requests[name], scheduler._book.accounts[name]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
        account.first_s, account.first_tokens = due_s, request.num_output_tokens
        account.parked_s = parked_s
    found = scheduler._admission.admitted(scheduler.waiting, 64, 1000.0)
    assert [request.request_id for request in found] == ["long_ago"], "the other one's turn comes after it"
    engine.finish()


@pytest.mark.parametrize("tier", [LOW, TOP])
def test_one_that_waits_for_its_turn_leaves_what_it_does_not_need_to_those_behind_it(stepped, tier):
    engine = stepped(200, chunk=32)  # so that what is computed again takes several steps
    expects(engine, 20)
    for name, prompt in (("first", 160), ("second", 176), ("pulls", 192)):
        engine.add(name, prompt, 60, tier=tier)
    for _ in range(8):
        engine.step()
    scheduler, now_s = engine.scheduler, time.monotonic()
    for name in ("first", "second", "pulls"):
        request = scheduler.requests[name]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s)
    accounts = scheduler._book.accounts
    accounts["pulls"].pulls = True
    scheduler.kv_cache_manager.reset_prefix_cache()
    output = engine.step()
    assert "first" in output.num_scheduled_tokens
    engine.add("newcomer", 16, 20, tier=tier)
    started = {*output.num_scheduled_tokens}
    for _ in range(4):  # a step computes 32 tokens of all of them together
        started |= {*engine.step().num_scheduled_tokens}
    assert {"pulls", "newcomer"} <= started
    assert "first" in scheduler._book.restoring
    assert "second" in scheduler._book.parked, "one at a time"
    engine.finish()


def test_nobody_takes_the_memory_of_one_that_waits_for_its_turn(stepped):
    engine = stepped(60)
    expects(engine, 10)
    for name, prompt in (("first", 320), ("second", 336)):
        engine.add(name, prompt, 20, tier=LOW)
    for _ in range(8):
        engine.step()
    scheduler, now_s = engine.scheduler, time.monotonic()
    for name in ("first", "second"):
        request = scheduler.requests[name]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s)
    scheduler.kv_cache_manager.reset_prefix_cache()
    assert "first" in engine.step().num_scheduled_tokens
    engine.add("large", 320, 10, tier=LOW)
    engine.step()
    assert "large" not in [request.request_id for request in scheduler.running]
    engine.finish()
    assert engine.finished.index("second") < engine.finished.index("large")
