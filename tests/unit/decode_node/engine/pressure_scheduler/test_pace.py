"""Who is left out of a step, or does not start yet, for the pace of others."""

import pytest
from pressure_steps import (
    LOW,
    TOP,
    knows_steps,
    kv_is_on_its_way,
    one_with_an_objective_beside_others,
    their_clients_leave,
)
from vllm.v1.request import RequestStatus

from slo.decode.restore import STARVES_AFTER_S
from slo.request import FIRST_DUE_XARG, TPOT_XARG

pytestmark = pytest.mark.slow


def test_prompts_that_are_computed_under_pressure_leave_something_for_the_streams(stepped):
    engine = stepped(2000)
    for number in range(10):
        engine.add(f"low{number}", 16, 200, tier=LOW)
    engine.step()
    for name in ("top1", "top2"):
        engine.add(name, 600, 5, tier=TOP)
    engine.step()
    engine.scheduler.running.sort(key=lambda request: not request.request_id.startswith("top"))
    engine.scheduler._book.restoring.add("low0")
    assert sum(name.startswith("low") for name in engine.step().num_scheduled_tokens) == 10
    engine.finish()


def test_streams_without_an_objective_are_left_out_for_one_that_is_late(stepped):
    engine = stepped(500)
    one_with_an_objective_beside_others(engine, stream_s=0.01)
    engine.step()
    account = engine.scheduler._book.accounts["urgent"]
    assert account.tpot_s == 0.05
    for _ in range(20):
        account.first_s = -1e9  # it is late, whatever the clock says
        engine.step()
    ran = [len(output.num_scheduled_tokens) for output in engine.outputs[2:]]
    assert min(ran) <= 4, "four streams take 41 ms"
    assert all("urgent" in output.num_scheduled_tokens for output in engine.outputs)
    for number in range(8):
        gaps, gap = [], 0
        for output in engine.outputs:
            gap = 0 if f"free{number}" in output.num_scheduled_tokens else gap + 1
            gaps.append(gap)
        assert max(gaps) <= 4 + 8, "nobody is left out for long"
    assert engine.scheduler._report.figures.skipped > 0
    account.first_s = 1e9
    engine.finish()


def test_a_row_ends_with_the_last_stream_that_has_an_objective(stepped):
    engine = stepped(500)
    one_with_an_objective_beside_others(engine, stream_s=0.01)
    engine.step()
    accounts = engine.scheduler._book.accounts
    while len(engine.outputs[-1].num_scheduled_tokens) == 9:
        accounts["urgent"].first_s = -1e9
        engine.step()
    engine.scheduler.finish_requests("urgent", RequestStatus.FINISHED_ABORTED)
    assert len(engine.step().num_scheduled_tokens) == 8
    assert all(account.left_out_s is None for account in accounts.values())
    engine.add("next", 20, 60, tier=TOP, tpot_s=0.05)
    engine.step()
    accounts["next"].first_s = 1e9
    assert len(engine.step().num_scheduled_tokens) == 9, "it has time"
    engine.finish()


def test_a_lower_tiers_streams_that_have_no_time_are_left_out_for_a_higher_one(stepped):
    """Four streams of 60 ms beside one of 50: steps of all take 51, and each of the four is late already."""
    engine = stepped(500)
    knows_steps(engine, fixed_s=0.001, stream_s=0.01)
    engine.add("urgent", 20, 60, tier=TOP, tpot_s=0.05)
    for number in range(4):
        engine.add(f"low{number}", 20, 60, tier=LOW, tpot_s=0.06)
    engine.step()
    accounts = engine.scheduler._book.accounts
    for _ in range(12):
        for account in accounts.values():
            account.first_s = -1e9
        engine.step()
    ran = [output.num_scheduled_tokens for output in engine.outputs[2:]]
    assert all("urgent" in names for names in ran)
    assert min(len(names) for names in ran) <= 4
    engine.finish()


def bear_with_an_urgent_one(engine):
    """How many of the lowest tier start at once beside a stream whose objective steps of 45 ms keep."""
    knows_steps(engine, fixed_s=0.001, stream_s=0.01)
    engine.add("urgent", 20, 60, tier=TOP, tpot_s=0.05)
    engine.step()


def test_newcomers_that_wait_together_start_as_far_as_the_others_bear_them(stepped):
    engine = stepped(2000)
    bear_with_an_urgent_one(engine)
    for number in range(40):
        engine.add(f"low{number}", 20, 60, tier=LOW)
    for _ in range(3):
        engine.step()
    started = [request.request_id for request in engine.scheduler.running]
    assert started == ["urgent", *[f"low{number}" for number in range(17)]], "34 ms with a fifth of each"
    for number in range(17, 40):
        engine.scheduler._book.accounts[f"low{number}"].arrived_s -= STARVES_AFTER_S + 1
    engine.step()
    assert len(engine.scheduler.running) == 41, "nobody waits for the pace for longer"
    engine.finish()


def test_a_newcomer_that_would_lose_its_own_objective_does_not_wait_for_the_pace_of_others(stepped):
    engine = stepped(2000)
    bear_with_an_urgent_one(engine)
    for number in range(20):
        engine.add(f"low{number}", 20, 60, tier=LOW)
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler
    accounts, running = scheduler._book.accounts, [*scheduler.running]
    waits, now_s = engine.add("waits", 20, 60, **{FIRST_DUE_XARG: 1000.0}), 999.0

    def admits(now_s, to_come=0):
        beside = scheduler._pace.beside(running, now_s)
        return scheduler._pace.admits(waits, beside, now_s - 1, now_s, to_come)

    assert not admits(990.0), "time enough"
    assert admits(999.3), "each step takes a fifth of a second"
    assert not admits(1000.1), "too late already"
    account = accounts["waits"]
    account.tpot_s, account.first_s = 0.5, now_s - 5
    assert not admits(now_s, to_come=100), "it gains a third of a second with each token"
    assert admits(now_s, to_come=17)
    assert not admits(now_s, to_come=10), "too late already"
    account.tpot_s = None
    assert not admits(now_s, to_come=17)
    engine.finish()


def test_newcomers_whose_kv_is_on_its_way_count_among_those_who_bear_the_next(stepped):
    engine = stepped(2000)
    bear_with_an_urgent_one(engine)
    scheduler = engine.scheduler
    kv_is_on_its_way(engine, 10)
    for number in range(40):
        engine.add(f"low{number}", 20, 60, tier=LOW)
    engine.step()
    assert len(scheduler.running) == 1 + 7
    their_clients_leave(engine, 10)
    engine.step()
    assert len(scheduler.running) == 1 + 17
    engine.finish()


def test_nobody_is_left_out_while_the_objective_is_kept(stepped):
    engine = stepped(500)
    one_with_an_objective_beside_others(engine, stream_s=0.001)
    engine.finish()
    assert engine.scheduler._report.figures.skipped == 0


def test_an_objective_that_no_step_can_keep_counts_as_none(stepped):
    """Others would compute again in the smallest chunks for it, and lose their memory in its place."""
    engine = stepped(2000)
    knows_steps(engine, fixed_s=0.02, stream_s=0.01)
    for name, tpot_s in (("out of reach", 0.029), ("in reach", 0.031)):
        engine.add(name, 20, 60, tier=LOW, **{TPOT_XARG: tpot_s})
    book = engine.scheduler._book
    assert [book.accounts[name].tpot_s for name in ("out of reach", "in reach")] == [None, 0.031]
    assert book.paced == {"in reach"}
    engine.finish()
