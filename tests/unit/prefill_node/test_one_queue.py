"""The scheduler, the governor, the report, the monitor's view and `slackserve top` tell of one queue."""

from dataclasses import replace

import pytest

from prefill_node.board.messages import Reached
from prefill_node.engine.stepping.step_choice import in_order
from prefill_node.replica.governing.ledger import Accepted
from prefill_node.replica.governing.snapshot import load, snapshot
from simulator.arms.arms import OURS, Scheduling
from simulator.cost.passes import Granularity
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import Arrival
from slo.preemption.types import Preempt
from slo.queue.order import DEFAULT_ORDER
from slo.queue.slack import slack_s
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

HARDWARE = PRESETS["flowprefill-8b"].hardware
NOTHING_REACHED = Reached(0, 0)
PUBLISHED_S, NOW_S = 20.0, 100.0
CHUNKED, OLD, RUNS, PREFERRED, LATE, FRESH = range(6)


class Replica:
    """One that steps by hand; a job is known to its governor, and with `seen` to its engine."""

    def __init__(self, launch_ahead_s=1.0):
        chunks = Scheduling(
            OURS,
            DEFAULT_ORDER,
            Granularity.SUBLAYER,
            launch_ahead_s,
            step_tokens=2048,
            foresees=True,
            is_fair=True,
        )
        self.replica = chunks.build(EventLoop(), HARDWARE, {}, lambda _: None)
        self.engine, self.governor = self.replica.engine, self.replica.governor

    def accept(self, number, at_s, tokens, ttft_s, tier, *, seen=True):
        job = Job(
            Arrival(number, at_s, "kind", tokens, 1, ttft_s, tier),
            DEFAULT_TIERS[tier].weight,
            float("inf") if ttft_s is None else at_s + ttft_s,
        )
        self.governor.arrived(Accepted(job.job_id, tier, tokens, job.deadline_s, at_s), at_s)
        if seen:
            self.engine.add(job, at_s)
        return job

    def scheduler_order(self):
        stepper, queues = self.engine._stepper, self.engine._queues
        waiting = [item for item in queues.queued() if item.prefill.job_id not in stepper.running.jobs]
        return in_order(waiting, queues.suspended(NOW_S), NOW_S, stepper.rules)


@pytest.fixture
def replica():
    """A step runs since long ago, a chunk is suspended, a class starves, and somebody has just arrived."""
    replica = Replica()
    engine = replica.engine
    replica.accept(CHUNKED, 0.0, 6000, 400.0, STANDARD)
    engine.issue(0.0)
    engine.complete(0.3)
    engine.issue(0.3)
    replica.accept(OLD, 0.4, 3000, None, BACKGROUND)
    engine.stop(0.5, 9, "", keep=True)
    replica.accept(RUNS, 19.0, 2000, 30.0, PREMIUM)
    replica.accept(PREFERRED, 19.1, 2000, 200.0, PREMIUM)
    replica.accept(LATE, 19.2, 2000, 40.0, STANDARD)
    engine._stepper.rules.fairness.step_ended({PREMIUM: 1}, 100.0, 19.5)
    assert engine.issue(PUBLISHED_S).view.jobs == (str(RUNS),)
    engine.view()  # published; who arrives now is not in it
    replica.late = replica.accept(FRESH, NOW_S - 1, 500, 5.0, STANDARD, seen=False)
    return replica


def test_all_agree_on_order_work_and_suspension_under_starvation(replica):
    governor, view = replica.governor, replica.engine.view()
    waiting = governor.waiting(view, NOW_S)
    told = load(governor, view, NOTHING_REACHED, NOW_S)
    shown = snapshot(governor, view, NOTHING_REACHED, NOW_S)
    replica.engine.add(replica.late, NOW_S)  # now it has arrived
    ordered = replica.scheduler_order()

    names = [str(name) for name in (FRESH, CHUNKED, OLD, PREFERRED, LATE)]
    assert [prefill.job_id for prefill in ordered] == names, "classes that starve go first"
    assert [prefill.job_id for prefill in waiting] == names
    assert [job.job_id for job in told.jobs] == [str(RUNS), *names]
    assert [job["job"] for job in shown["queue"]] == names

    work_s = {prefill.job_id: prefill.remaining_s for prefill in ordered}
    chunked = replica.engine.requests[str(CHUNKED)]
    assert 0.3 < work_s[chunked.job_id] / HARDWARE.predictor().prefill_s(6000) < 0.7, "a chunk is done"
    assert {prefill.job_id: prefill.remaining_s for prefill in waiting} == pytest.approx(work_s)
    assert {job.job_id: job.work_s for job in told.jobs[1:]} == pytest.approx(work_s)
    slacks_s = {
        prefill.job_id: slack_s(prefill.deadline_s, NOW_S, prefill.remaining_s)
        for prefill in ordered
        if prefill.tier != BACKGROUND
    }
    slacks_s[str(OLD)] = None
    assert {job["job"]: job["slack_s"] for job in shown["queue"]} == pytest.approx(slacks_s)

    suspended = {prefill.job_id: prefill.suspended_s for prefill in ordered if prefill.suspended_s}
    assert suspended == {str(CHUNKED): pytest.approx(NOW_S - 0.5)}
    assert {prefill.job_id: prefill.suspended_s for prefill in waiting if prefill.suspended_s} == suspended
    assert [[job["job"] for job in step["jobs"]] for step in shown["suspended"]] == [[str(CHUNKED)]]
    assert [step.jobs for step in view.suspended] == [(str(CHUNKED),)]


def test_a_step_that_goes_on_is_published_with_the_suspension_that_has_ended():
    replica = Replica()
    replica.accept(CHUNKED, 0.0, 2000, None, STANDARD)
    replica.engine.issue(0.0)
    replica.engine.stop(1.0, 9, "", keep=True)
    replica.engine.issue(9.0)
    (running,) = replica.engine.view().step.members
    assert (running.preemptions, running.suspended_s) == (1, 8.0)


def test_a_prompt_may_be_stopped_as_often_in_each_of_its_chunks():
    replica = Replica(launch_ahead_s=0.0)
    once = replace(OURS, limits=replace(OURS.limits, max_preemptions=1))
    replica.governor.follow(HARDWARE.predictor(), once)
    engine = replica.engine
    replica.accept(CHUNKED, 0.0, 6000, None, BACKGROUND)
    for chunk in range(3):
        for stops in range(2):
            (running,) = engine.issue(chunk).view.members
            assert running.preemptions == chunk + stops, "it counts as one that was stopped"
            in_s = replica.governor.preemptible_in_s(engine.view(), NOTHING_REACHED, chunk)
            assert (in_s is None) == (stops == 1)
            if in_s is not None:
                engine.stop(chunk, 9, "", keep=True)
        engine.complete(chunk)


def test_a_victim_waits_also_while_its_beneficiary_is_stopped_near_its_end():
    """Of the beneficiary only what is left of its step counts, which is in time; all of its chunk is not."""
    replica, alone_s = Replica(launch_ahead_s=0.0), HARDWARE.predictor().prefill_s(2000)
    replica.accept(CHUNKED, 0.0, 2000, 40.0, BACKGROUND)
    engine = replica.engine
    engine.issue(0.0)
    replica.accept(RUNS, 0.1, 2000, 1.5 * alone_s, STANDARD)
    engine.stop(0.1, 9, str(RUNS), keep=True)
    runs, now_s = engine.issue(0.1), 0.1 + alone_s
    replica.accept(PREFERRED, now_s, 200, 20.0, PREMIUM)
    engine.stop(now_s, runs.times.boundaries - 2, str(PREFERRED), keep=True)
    _, beneficiary = engine._suspensions.steps
    assert beneficiary.done > 0.9
    victim, waits = engine._queues.suspended(now_s)
    assert victim.blocked
    assert waits.blocked
    shown = {prefill.job_id: prefill for prefill in replica.governor.waiting(engine.view(), now_s)}
    assert shown[str(CHUNKED)].preempted_by == str(RUNS), "it stops nobody meanwhile"


def stopped_for(replica, suspended_s):
    """One with 60,000 tokens has been stopped in its first chunk, and suspended for so long."""
    replica.accept(CHUNKED, 0.0, 60_000, None, BACKGROUND)
    replica.engine.issue(0.0)
    replica.engine.stop(0.1, 9, "", keep=True)
    replica.engine.issue(0.1 + suspended_s)


@pytest.mark.parametrize("suspended_s", [599.0, 601.0], ids=["not as long as it may be", "longer"])
def test_a_prompt_between_two_chunks_does_not_go_first_for_how_long_one_was_suspended(suspended_s):
    """The engine lets one go first that is due, and the running step is stopped for it."""
    replica = Replica(launch_ahead_s=0.0)
    stopped_for(replica, suspended_s)
    replica.engine.complete(700.0)
    replica.accept(RUNS, 700.0, 8000, 60.0, STANDARD)
    replica.engine._stepper.rules.fairness.step_ended({BACKGROUND: 1}, 100.0, 700.0)
    assert replica.engine.issue(700.0).view.jobs == (str(RUNS),)
    view = replica.engine.view()
    needs_s = HARDWARE.predictor().prefill_s(2000)
    urgent = replica.accept(FRESH, 710.0, 2000, 1.5 * needs_s, PREMIUM, seen=False)
    names = [prefill.job_id for prefill in replica.governor.waiting(view, 710.0)]
    decision = replica.governor.decide(view, NOTHING_REACHED, 710.0)
    replica.engine.add(urgent, 710.0)
    assert names == [prefill.job_id for prefill in replica.scheduler_order()] == [str(FRESH), str(CHUNKED)]
    assert isinstance(decision, Preempt)
    assert decision.beneficiary == str(FRESH)


def test_a_prompt_that_starts_over_does_not_go_first_for_how_long_it_was_suspended():
    replica = Replica()
    stopped_for(replica, 601.0)
    replica.engine.complete(700.0)
    replica.engine._start_over([replica.engine.running[0].request_id], 700.0)
    assert [item.prefill.suspended_s for item in replica.engine.view().queue] == [0.0]


def test_what_is_published_stands_in_the_order_in_which_it_would_run(replica):
    at_publication = [item.prefill.job_id for item in replica.engine.view().queue]
    assert at_publication == [str(name) for name in (LATE, PREFERRED, OLD)]
