"""Requests that the router holds back: none is lost, and each ends once."""

import asyncio
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core import RouterCore, RouterLimits
from router.messages import Evicted, Held, Placed, PlacementRequested, Rejected
from router.placement.least_harm import LeastHarm
from router.serve.tickets import Tickets
from slo.errors import EvictionReason
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, OutstandingJob, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD, TierPolicy

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
POLICIES = {
    PREMIUM: TierPolicy(None, None, sheddable=False, weight=4.0),
    STANDARD: TierPolicy(None, None, sheddable=True, weight=2.0),
    BACKGROUND: TierPolicy(None, None, sheddable=True, weight=1.0),
}
AHEAD_S = 0.1


def core(*names, late_binding=True, decode=True):
    limits = RouterLimits(stale_after_s=1e9, late_binding=late_binding, bind_ahead_s=AHEAD_S)
    router = RouterCore(POLICIES, LeastHarm(), limits)
    for name in names:
        router.prefill_reported(report(name), 0.0)
    if decode:
        router.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    return router


def report(name, *jobs, preemptible_in_s=0.0, **rest):
    running = jobs[0].job_id if jobs else None
    return PrefillReported(ReplicaId(name), LINE, jobs, running, 0.0, preemptible_in_s, **rest)


def runs(tokens, budget_s=None, tier=STANDARD, name="runs"):
    return OutstandingJob(JobId(name), tier, tokens, budget_s)


def request(name, tokens=1000, ttft_s=10.0, tier=STANDARD):
    return PlacementRequested(JobId(name), Objective(tier, ttft_s, None), True, tokens, 0)


def test_what_can_start_soon_is_placed_at_once():
    router = core("a")
    assert isinstance(router.place(request("first"), 0.0), Placed)
    router.prefill_reported(report("a", runs(50)), 0.0)
    assert isinstance(core("a").place(request("second"), 0.0), Placed)


def test_what_cannot_start_soon_waits_until_a_replica_can_start_it():
    router = core("a")
    router.prefill_reported(report("a", runs(2000)), 0.0)
    assert router.place(request("x"), 0.0) == Held(JobId("x"))
    assert router.due(1.0) == []
    look_s = router.next_look_s(1.0)
    assert look_s == pytest.approx(2.0 - AHEAD_S)
    [(ticket, placed)] = router.due(look_s + 1e-6)
    assert ticket == "x"
    assert placed.prefill_replica == "a"
    assert placed.predicted_ttft_s == pytest.approx(3.0)
    assert router.held == 0
    assert router.due(look_s + 0.1) == []


def test_whichever_replica_is_free_first_gets_it():
    router = core("a", "b")
    router.prefill_reported(report("a", runs(2000)), 0.0)
    router.prefill_reported(report("b", runs(3000, name="other")), 0.0)
    assert isinstance(router.place(request("x"), 0.0), Held)
    router.prefill_reported(report("b", ended=(JobId("other"),)), 0.5)
    [(_, placed)] = router.due(0.5)
    assert placed.prefill_replica == "b"


def test_what_would_stop_a_pass_is_placed_at_once():
    router = core("a")
    router.prefill_reported(report("a", runs(2000)), 0.0)
    assert isinstance(router.place(request("x", tokens=100, ttft_s=0.5), 0.0), Placed)


def test_what_has_little_to_spare_is_placed():
    router = core("a")
    router.prefill_reported(report("a", runs(2000)), 0.0)
    assert isinstance(router.place(request("tight", tokens=100, ttft_s=2.15), 0.0), Placed)
    assert isinstance(router.place(request("loose", tokens=100, ttft_s=2.45), 0.0), Held)


def test_the_nearest_deadline_goes_first():
    router = core("a")
    router.prefill_reported(report("a", runs(2000)), 0.0)
    for name, ttft_s in (("far", 30.0), ("near", 8.0), ("middle", 20.0)):
        assert isinstance(router.place(request(name, ttft_s=ttft_s), 0.0), Held)
    router.prefill_reported(report("a", ended=(JobId("runs"),)), 1.0)
    assert [ticket for ticket, _ in router.due(1.0)] == ["near"]


def test_a_deadline_that_has_become_impossible_evicts_the_sheddable_only():
    router = core("a")
    router.prefill_reported(report("a", runs(2000)), 0.0)
    for tier in (STANDARD, PREMIUM):
        assert isinstance(router.place(request(tier, ttft_s=4.0, tier=tier), 0.0), Held)
    router.prefill_reported(report("a", runs(9000, 9.0, PREMIUM, name="next"), preemptible_in_s=None), 3.0)
    [(ticket, evicted)] = router.due(3.5)
    assert ticket == "standard"
    assert evicted == Evicted(EvictionReason.DEADLINE_PASSED, 4.0, pytest.approx(3.5))
    router.prefill_reported(report("a", ended=(JobId("next"),)), 12.0)
    [(ticket, placed)] = router.due(12.0)
    assert (ticket, placed.slack_s < 0) == ("premium", True)


def test_a_client_that_leaves_takes_its_request_with_it():
    router = core("a")
    router.prefill_reported(report("a", runs(2000)), 0.0)
    router.place(request("x"), 0.0)
    router.job_ended(JobId("x"), 0.1)
    assert router.held == 0
    assert router.due(5.0) == []
    assert router.next_look_s(5.0) == math.inf


def test_the_work_of_a_lost_replica_is_not_waited_for():
    router = core("a", "b")
    for name in ("a", "b"):
        router.prefill_reported(report(name, runs(3000, name=f"on-{name}")), 0.0)
    router.place(request("x"), 0.0)
    router.replica_gone(ReplicaGone(ReplicaId("a")))
    router.prefill_reported(report("c"), 0.2)
    assert [placed.prefill_replica for _, placed in router.due(0.2)] == ["c"]


def test_two_routers_that_hear_the_same_reports_count_each_job_once():
    ours, theirs = core("a", "b", late_binding=False), core("a", "b", late_binding=False)
    placed = ours.place(request("x"), 0.0)
    seen = OutstandingJob(JobId("x"), STANDARD, 900, 9.5)
    for router in (ours, theirs):
        router.prefill_reported(report(placed.prefill_replica, seen), 0.1)
    for router in (ours, theirs):
        assert router.prefill[placed.prefill_replica].outstanding_tokens == 900
        assert sum(len(replica.jobs) for replica in router.prefill.values()) == 1
    other = theirs.place(request("y"), 0.1)
    assert other.prefill_replica != placed.prefill_replica
    for router in (ours, theirs):
        router.prefill_reported(report(placed.prefill_replica, ended=(JobId("x"),)), 1.0)
        router.prefill_reported(report(other.prefill_replica, runs(1000, name="y")), 1.0)
        assert {job for replica in router.prefill.values() for job in replica.jobs} == {"y"}


def test_a_router_started_anew_knows_the_fleet_from_the_reports():
    first = core("a", "b", late_binding=False)
    jobs = {first.place(request(f"{n}"), 0.0).prefill_replica: f"{n}" for n in range(2)}
    anew = core(late_binding=False)
    for name, job in jobs.items():
        anew.prefill_reported(report(name, runs(1000, 9.0, name=job)), 0.5)
    for name in jobs:
        assert set(anew.prefill[name].jobs) == set(first.prefill[name].jobs)


def test_a_shared_prefix_leads_to_the_replica_that_has_it():
    router = core("a", "b", late_binding=False)
    prefix = {"prefix_hashes": (1, 2, 3, 4), "hash_block": 200}
    objective = Objective(STANDARD, 30.0, None)
    first = router.place(PlacementRequested(JobId("1"), objective, True, 1000, 0, **prefix), 0.0)
    second = router.place(PlacementRequested(JobId("2"), objective, True, 1000, 0, **prefix), 0.0)
    assert (first.cached_tokens, second.cached_tokens) == (0, 800)
    assert second.prefill_replica == first.prefill_replica
    router.replica_gone(ReplicaGone(ReplicaId(first.prefill_replica)))
    router.prefill_reported(report(first.prefill_replica), 1.0)
    third = router.place(PlacementRequested(JobId("3"), objective, True, 1000, 0, **prefix), 1.0)
    assert third.cached_tokens == 0


class HeldMachine(RuleBasedStateMachine):
    """Every request that asks for a place is placed, rejected, evicted or cancelled: one of them, once."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.number = 0
        self.router = core("a", "b")
        self.held: set[JobId] = set()
        self.ended: dict[JobId, str] = {}
        self.running: dict[str, list[OutstandingJob]] = {"a": [], "b": []}

    def end(self, job, how):
        assert job not in self.ended, f"{job} has ended twice"
        self.ended[job] = how
        self.held.discard(job)

    def settle(self):
        for job, outcome in self.router.due(self.now_s):
            assert job in self.held
            self.end(job, type(outcome).__name__)
            if isinstance(outcome, Placed):
                self.put(job, outcome)

    def put(self, job, placed):
        tokens, name = placed.tokens, str(placed.prefill_replica)
        self.running[name].append(OutstandingJob(job, STANDARD, tokens, 5.0))

    @rule(
        tokens=st.integers(1, 3000),
        ttft_s=st.one_of(st.none(), st.floats(0.05, 8.0)),
        tier=st.sampled_from([PREMIUM, STANDARD, BACKGROUND]),
    )
    def ask(self, tokens, ttft_s, tier):
        self.number += 1
        job = JobId(f"{self.number}")
        match decision := self.router.place(request(job, tokens, ttft_s, tier), self.now_s):
            case Placed():
                self.end(job, "Placed")
                self.put(job, decision)
            case Rejected():
                self.end(job, "Rejected")
            case Held():
                assert decision.ticket == job
                self.held.add(job)
        self.settle()

    @rule(seconds=st.floats(0.001, 2.0))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.settle()

    @rule()
    def look_when_told(self):
        at_s = self.router.next_look_s(self.now_s)
        if at_s < math.inf:
            assert at_s > self.now_s
            self.now_s = at_s
            self.settle()

    @rule(name=st.sampled_from(["a", "b"]))
    def finish(self, name):
        done, self.running[name] = self.running[name][:1], self.running[name][1:]
        ended = tuple(job.job_id for job in done)
        self.router.prefill_reported(report(name, *self.running[name], ended=ended), self.now_s)
        self.settle()

    @rule(data=st.data())
    def client_leaves(self, data):
        if self.held:
            job = data.draw(st.sampled_from(sorted(self.held)))
            self.router.job_ended(job, self.now_s)
            self.end(job, "Cancelled")
            self.settle()

    @rule(name=st.sampled_from(["a", "b"]))
    def replica_dies_and_comes_back(self, name):
        self.router.replica_gone(ReplicaGone(ReplicaId(name)))
        self.settle()
        self.running[name] = []
        self.router.prefill_reported(report(name), self.now_s)
        self.settle()

    @invariant()
    def every_request_is_held_or_has_ended(self):
        assert self.router.held == len(self.held)
        assert len(self.held) + len(self.ended) == self.number
        assert (self.router.next_look_s(self.now_s) < math.inf) == bool(self.held)

    def teardown(self):
        """With the replicas idle and time passing, whoever is held is placed or evicted."""
        for _ in range(200):
            if not self.held:
                break
            self.now_s += 1.0
            for name in self.running:
                ended = tuple(job.job_id for job in self.running[name])
                self.running[name] = []
                self.router.prefill_reported(report(name, ended=ended), self.now_s)
                self.settle()
        assert not self.held


HeldMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestHeldMachine = HeldMachine.TestCase


# Tickets


async def test_a_ticket_is_answered_once_its_request_is_settled():
    tickets = Tickets()
    ticket = JobId("x")
    tickets.issue(ticket)
    assert await tickets.outcome(ticket, 0.001) == Held(ticket)
    waiting = asyncio.create_task(tickets.outcome(ticket, 5.0))
    await asyncio.sleep(0)
    evicted = Evicted(EvictionReason.DEADLINE_PASSED, 1.0, 2.0)
    tickets.settle(ticket, evicted)
    assert await waiting == evicted
    assert await tickets.outcome(ticket, 0.001) is None
    assert len(tickets) == 0


async def test_a_settled_ticket_waits_for_its_client():
    tickets = Tickets()
    tickets.issue(JobId("x"))
    evicted = Evicted(EvictionReason.DEADLINE_PASSED, 1.0, 2.0)
    tickets.settle(JobId("x"), evicted)
    assert await tickets.outcome(JobId("x"), 0.001) == evicted


async def test_a_client_that_leaves_ends_the_wait():
    tickets = Tickets()
    tickets.issue(JobId("x"))
    waiting = asyncio.create_task(tickets.outcome(JobId("x"), 5.0))
    await asyncio.sleep(0)
    tickets.drop(JobId("x"))
    assert await waiting is None
    tickets.settle(JobId("x"), Evicted(EvictionReason.DEADLINE_PASSED, None, 0.0))
    assert len(tickets) == 0
