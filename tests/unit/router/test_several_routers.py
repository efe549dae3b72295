"""Routers that hear the same reports, and one that starts anew, agree on the fleet."""

from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import PlacementRequested
from router.placement.least_harm import LeastHarm
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, OutstandingJob, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import STANDARD, TierPolicy

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
POLICIES = {STANDARD: TierPolicy(None, None, sheddable=True, weight=2.0)}


def core(*names):
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=1e9))
    for name in names:
        router.prefill_reported(report(name), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    return router


def report(name, *jobs, preemptible_in_s=0.0, **rest):
    running = jobs[0].job_id if jobs else None
    return PrefillReported(ReplicaId(name), LINE, jobs, running, 0.0, preemptible_in_s, **rest)


def runs(tokens, budget_s=None, tier=STANDARD, name="runs"):
    return OutstandingJob(JobId(name), tier, tokens, budget_s)


def request(name, tokens=1000, ttft_s=10.0, tier=STANDARD):
    return PlacementRequested(JobId(name), Objective(tier, ttft_s, None), True, tokens, 0)


def test_two_routers_that_hear_the_same_reports_count_each_job_once():
    ours, theirs = core("a", "b"), core("a", "b")
    placed = ours.place(request("x"), 0.0)
    seen = OutstandingJob(JobId("x"), STANDARD, 900, 9.5)
    for router in (ours, theirs):
        router.prefill_reported(report(placed.prefill_replica, seen), 0.1)
    for router in (ours, theirs):
        assert router.view.prefill[placed.prefill_replica].outstanding_tokens == 900
        assert sum(len(replica.jobs) for replica in router.view.prefill.values()) == 1
    other = theirs.place(request("y"), 0.1)
    assert other.prefill_replica != placed.prefill_replica
    for router in (ours, theirs):
        router.prefill_reported(report(placed.prefill_replica, ended=(JobId("x"),)), 1.0)
        router.prefill_reported(report(other.prefill_replica, runs(1000, name="y")), 1.0)
        assert {job for replica in router.view.prefill.values() for job in replica.jobs} == {"y"}


def test_a_router_started_anew_knows_the_fleet_from_the_reports():
    first = core("a", "b")
    jobs = {first.place(request(f"{n}"), 0.0).prefill_replica: f"{n}" for n in range(2)}
    anew = core()
    for name, job in jobs.items():
        anew.prefill_reported(report(name, runs(1000, 9.0, name=job)), 0.5)
    for name in jobs:
        assert set(anew.view.prefill[name].jobs) == set(first.view.prefill[name].jobs)


def test_a_shared_prefix_leads_to_the_replica_that_has_it():
    router = core("a", "b")
    prefix = {"prefix_hashes": (1, 2, 3, 4), "hash_block": 200}
    objective = Objective(STANDARD, 30.0, None)
    first = router.place(PlacementRequested(JobId("1"), objective, True, 1000, 0, **prefix), 0.0)
    second = router.place(PlacementRequested(JobId("2"), objective, True, 1000, 0, **prefix), 0.0)
    assert (first.cached_tokens, second.cached_tokens) == (0, 800)
    assert second.prefill_replica == first.prefill_replica
    router.view.replica_gone(ReplicaGone(ReplicaId(first.prefill_replica)))
    router.prefill_reported(report(first.prefill_replica), 1.0)
    third = router.place(PlacementRequested(JobId("3"), objective, True, 1000, 0, **prefix), 1.0)
    assert third.cached_tokens == 0


def test_a_job_that_turns_up_elsewhere_is_not_on_its_way_to_where_it_was_placed():
    """Its ingress did not wait for the router's answer."""
    router = core("a", "b", "c")
    expected = router.place(request("x"), 0.0).prefill_replica
    here, elsewhere = (name for name in "abc" if name != expected)
    router.prefill_reported(report(here, runs(1000, name="x")), 0.1)
    assert not router.view.prefill[expected].jobs
    assert router.view.prefill[expected].outstanding_tokens == 0
    assert set(router.view.prefill[here].jobs) == {"x"}
    router.prefill_reported(report(elsewhere, runs(1000, name="x")), 0.2)
    assert set(router.view.prefill[here].jobs) == {"x"}, "it says itself that it has it"
