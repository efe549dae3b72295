"""What a prefill replica tells the monitor, and what it makes of policies and directives."""

from types import SimpleNamespace

import pytest
from governors import BOUNDARIES, NOTHING_REACHED, governor_of, ledger_of
from played_watch import PlayedWatch
from published import LINE, Account, Engine, running, suspended

from prefill_node.board.events import Passed, Resumed, Stopped, decode
from prefill_node.board.messages import Reached, SchedulerView, StepView
from prefill_node.engine.board_writer import Bulletin
from prefill_node.replica import monitor_link
from prefill_node.replica.governing.ledger import Accepted
from prefill_node.replica.governing.monitor_view import replica_seen
from prefill_node.replica.monitor_link import Monitored
from slo.monitor.directives import DirectiveReason, PreemptDirective, StepSeen, WaiterSeen
from slo.monitor.policy import ClusterPolicy
from slo.preemption.types import (
    Keep,
    KeepReason,
    Limits,
    Preempt,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
    PreemptReason,
)
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

R = ReplicaId("r")
NOW_S = 100.0
ENGINE = Engine()


def job(name, tokens=1000, due_in_s=NO_DEADLINE, tier=BACKGROUND):
    return Accepted(JobId(name), tier, tokens, NOW_S + due_in_s, NOW_S - 1.0)


LONG = ENGINE.knows(job("long", 2000))
URGENT = ENGINE.knows(job("urgent", 100, 1.1, PREMIUM))
ENGINE.knows(job("first", 100, 5.0))


def governor(*jobs, mode=PreemptionMode.RESUME, boundaries=BOUNDARIES, **limits):
    rules = PreemptionRules(mode=mode, limits=Limits(**limits))
    return governor_of(ledger_of(*jobs, predictor=LINE), rules, boundaries)


def view(*jobs, suspended=(), accounts=None, guard=0.0, stoppable=True):
    step = running(*(jobs or ("long",)), tokens=2000, started_s=NOW_S, stoppable=stoppable, guard=guard)
    return ENGINE.view(step, *suspended, **(accounts or {}))


def order(step_id=7, beneficiary="urgent"):
    return PreemptDirective(R, step_id, JobId(beneficiary), DirectiveReason.OUT_OF_TIME)


# What is told


def test_the_running_step_is_told_and_whom_it_makes_late_with_their_slack():
    in_time, late = job("in time", 100, 5.0, PREMIUM), job("late", 2000, 1.0, PREMIUM)
    later = job("later", 100, 1.15, PREMIUM)
    told = replica_seen(
        R,
        governor(LONG, later, URGENT, in_time, late, job("idle")),
        view(),
        Reached(7, 3),
        KeepReason.WAITERS_IN_TIME,
        NOW_S,
    )
    assert told.replica_id == R
    assert told.step == StepSeen(
        7, (BACKGROUND,), pytest.approx(1.4), pytest.approx(0.1), KeepReason.WAITERS_IN_TIME
    )
    assert told.waiting == (WaiterSeen(JobId("urgent"), PREMIUM, pytest.approx(1.0)),)


@pytest.mark.parametrize("kept", [None, KeepReason.NOBODY_WAITS, KeepReason.CANNOT_SAVE])
def test_nobody_is_told_where_the_governor_is_not_overruled(kept):
    assert replica_seen(R, governor(LONG, URGENT), view(), Reached(7, 5), kept, NOW_S).waiting == ()


def test_a_report_does_not_grow_with_the_queue():
    own = [job(f"own-{n}", 100, 1.1) for n in range(4000)]
    told = replica_seen(R, governor(LONG, *own), view(), Reached(7, 3), KeepReason.WAITERS_IN_TIME, NOW_S)
    assert told.waiting == ()
    urgent = [job(f"{tier}-{n}", 100, 1.1, tier) for n in range(500) for tier in (PREMIUM, STANDARD)]
    told = replica_seen(
        R, governor(LONG, *own, *urgent), view(), Reached(7, 3), KeepReason.WAITERS_IN_TIME, NOW_S
    )
    assert {waiter.tier for waiter in told.waiting} == {PREMIUM, STANDARD}
    assert len(told.waiting) == 2


def test_a_step_at_one_of_its_limits_does_not_yield():
    told = replica_seen(
        R, governor(LONG, max_preemptions=0), view(), NOTHING_REACHED, KeepReason.MAX_PREEMPTIONS, NOW_S
    )
    assert told.step.preemptible_in_s is None


def test_before_the_engine_has_said_anything_there_is_nothing_to_tell():
    assert replica_seen(R, governor(URGENT), None, NOTHING_REACHED, None, NOW_S).waiting == ()
    idle = replica_seen(R, governor(URGENT), SchedulerView(), NOTHING_REACHED, None, NOW_S)
    assert (idle.step, idle.waiting) == (None, ()), "no step is in the way of anybody"


@pytest.fixture
def seen(monkeypatch):
    """What is told of a view by a replica whose governor works, or has failed."""

    def told(shown, *, is_up):
        participants = []
        client = SimpleNamespace(start=lambda: None)
        monkeypatch.setattr(
            monitor_link, "MonitorClient", lambda participant, _: participants.append(participant) or client
        )
        watched = governor(LONG, URGENT)
        watched.has_failed = not is_up
        watch = PlayedWatch(
            is_up=is_up,
            view=lambda: shown,
            reached=lambda: Reached(7, 3),
            kept=lambda _: KeepReason.WAITERS_IN_TIME,
            direct=None,
        )
        Monitored(R, watched).start(watch, None)
        return participants[0].seen(()).work

    return told


@pytest.mark.parametrize("is_up", [True, False])
def test_what_runs_is_told_also_after_the_governor_has_failed(seen, is_up):
    step = seen(view(), is_up=is_up).step
    assert (step.step_id, step.remaining_s) == (7, pytest.approx(1.4))
    assert (step.preemptible_in_s is not None) == is_up, "nothing is stopped any more"


def test_of_a_view_that_the_governor_has_failed_on_nothing_is_told(seen):
    unreadable = SchedulerView(StepView(7, None, 2000, 0.0, 0, 0.0, True, 0.0))
    with pytest.raises(TypeError):
        seen(unreadable, is_up=True)
    assert seen(unreadable, is_up=False).step is None


# Directives


def test_a_directive_that_makes_sense_is_carried_out_once():
    watched = governor(LONG, URGENT)
    decision = watched.direct(order(), view(), NOTHING_REACHED, NOW_S)
    assert decision == Preempt(7, JobId("urgent"), PreemptReason.DIRECTED)
    assert watched.direct(order(), view(), NOTHING_REACHED, NOW_S) == Keep(KeepReason.IDLE)
    assert watched.decide(view(), NOTHING_REACHED, NOW_S) == Keep(KeepReason.IDLE)


PREEMPTED = suspended("urgent", tokens=100, boundary=0, kept_bytes=0, since_s=NOW_S - 1, preempted_by="first")

POINTLESS = {
    "it comes late": (governor(LONG, URGENT), order(6), view(), KeepReason.IDLE),
    "nothing runs": (governor(URGENT), order(), SchedulerView(), KeepReason.IDLE),
    "nothing is known": (governor(URGENT), order(), None, KeepReason.IDLE),
    "the beneficiary is gone": (governor(LONG), order(), view(), KeepReason.NOBODY_WAITS),
    "the beneficiary runs itself": (
        governor(LONG, URGENT),
        order(),
        view("long", "urgent"),
        KeepReason.NOBODY_WAITS,
    ),
    "the beneficiary is done": (
        governor(LONG, URGENT),
        order(),
        SchedulerView(view().step, done=("urgent",)),
        KeepReason.NOBODY_WAITS,
    ),
    "it is too late for the beneficiary": (
        governor(LONG, job("urgent", 100, 0.2, PREMIUM)),
        order(),
        view(),
        KeepReason.CANNOT_SAVE,
    ),
    "the beneficiary has been preempted itself": (
        governor(LONG, URGENT, job("first", 100, 5.0)),
        order(),
        view(suspended=(PREEMPTED,)),
        KeepReason.PROTECTED,
    ),
    "the step's class would starve": (
        governor(LONG, URGENT),
        order(),
        view(guard=4.0),
        KeepReason.STARVING,
    ),
    "the step has been stopped often enough": (
        governor(LONG, URGENT, max_preemptions=2),
        order(),
        view(accounts={"long": Account(2, 0.0, 0)}),
        KeepReason.MAX_PREEMPTIONS,
    ),
    "the step would be suspended for too long": (
        governor(LONG, URGENT, max_suspended_s=1.0),
        order(),
        view(accounts={"long": Account(1, 0.8, 0)}),
        KeepReason.MAX_SUSPENDED_TIME,
    ),
    "the step cannot be stopped": (
        governor(LONG, URGENT),
        order(),
        view(stoppable=False),
        KeepReason.NOT_STOPPABLE,
    ),
    "nothing can": (governor(LONG, URGENT, boundaries=0), order(), view(), KeepReason.OFF),
    "nothing may": (governor(LONG, URGENT, mode=PreemptionMode.OFF), order(), view(), KeepReason.OFF),
}


@pytest.mark.parametrize(("watched", "directive", "seen", "why"), POINTLESS.values(), ids=POINTLESS)
def test_a_directive_that_makes_no_sense_any_more_does_nothing(watched, directive, seen, why):
    assert watched.direct(directive, seen, NOTHING_REACHED, NOW_S) == Keep(why)
    assert watched.ordered == 0


# Policies


def test_a_policy_changes_the_rules_but_neither_mode_nor_limits_nor_predictions():
    watched = governor(URGENT, mode=PreemptionMode.RECOMPUTE, max_preemptions=3)
    monitored = Monitored(R, watched)
    monitored.correct(2.0)
    monitored.follow(ClusterPolicy(1, preemption=PreemptionPolicy.RESCUE, margin=4.0))
    assert watched.ledger.predictor.prefill_s(1000) == pytest.approx(2.0)
    rules = watched.rules
    assert (rules.policy, rules.margin) == (PreemptionPolicy.RESCUE, 4.0)
    assert (rules.mode, rules.limits.max_preemptions) == (PreemptionMode.RECOMPUTE, 3)


def test_a_correction_is_of_the_predictions_alone():
    watched = governor(URGENT)
    monitored = Monitored(R, watched)
    before_s = watched.waiting(view(), NOW_S)[0].remaining_s
    monitored.follow(ClusterPolicy(1, margin=4.0))
    monitored.correct(2.0)
    assert watched.ledger.predictor.prefill_s(1000) == pytest.approx(2.0)
    assert watched.ledger.predictor.handoff_s == LINE.handoff_s
    assert watched.waiting(view(), NOW_S)[0].remaining_s == pytest.approx(2 * before_s)
    assert watched.rules.margin == 4.0


def test_corrections_are_of_the_configured_predictor_and_do_not_multiply():
    watched = governor()
    monitored = Monitored(R, watched)
    monitored.correct(2.0)
    monitored.correct(3.0)
    assert watched.ledger.predictor.prefill_s(1000) == pytest.approx(3.0)
    monitored.correct(1.0)
    assert watched.ledger.predictor == LINE
    assert watched.rules == PreemptionRules()


def test_a_measured_pass_is_told_beside_both_predictions():
    monitored = Monitored(R, governor())
    monitored.correct(2.0)
    told = monitored.learn(Passed(500, 0.0, 1.2))
    assert (told.corrected_s, told.measured_s) == pytest.approx((1.0, 1.2))
    assert told.predicted_s == pytest.approx(1.2), "learned from it, and not corrected"


# Measured passes, in the engine


@pytest.fixture
def bulletin(board):
    bulletin = Bulletin(str(board.path))
    yield bulletin
    bulletin.close()


def passed(board):
    notices = [decode(record) for record in board.take_events()]
    return [notice for notice in notices if isinstance(notice, Passed)]


def test_a_step_that_ran_to_its_end_is_measured_once(board, bulletin):
    bulletin.issued(view(), None)
    bulletin.ended()
    assert passed(board) == [], "it may turn out to have been stopped"
    bulletin.show(SchedulerView())
    bulletin.show(SchedulerView())
    (measured,) = passed(board)
    assert (measured.tokens, measured.pairs) == (2000, 0.0)
    assert measured.seconds != 0.0
    bulletin.issued(view(), None)
    bulletin.ended()
    bulletin.issued(view(), None)
    assert len(passed(board)) == 1


def test_a_step_that_was_stopped_or_resumed_says_nothing_of_how_long_one_takes(board, bulletin):
    bulletin.issued(view(), None)
    bulletin.ended()
    bulletin.notice(
        Stopped(7, ("long",), "urgent", "rescue", 3, BOUNDARIES, 0.3, 0.3, 2000, 0.0, True, 0, NOW_S, NOW_S)
    )
    bulletin.issued(view(), Resumed(("long",), 3, 1.0, NOW_S, NOW_S))
    bulletin.ended()
    bulletin.show(SchedulerView())
    assert passed(board) == []
