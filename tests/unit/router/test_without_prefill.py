"""What is left to decode for want of a prefill replica."""

import pytest
from small_router import POLICIES, report, request

from router.admission import Gate
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import Placed, PlacementReason, PlacementRequested
from router.placement.least_harm import LeastHarm
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates, TenantLimit
from slo.errors import RejectionReason
from slo.replacement import FailureCause, ReplacementRequested
from slo.reports import DecodeReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM


def without_prefill(max_local=2, **given):
    limits = RouterLimits(stale_after_s=100.0, local_prefill=max_local > 0, max_local_prefills=max_local)
    router = RouterCore(POLICIES, LeastHarm(), limits, **given)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0, kv_tokens=10_000), 0.0)
    return router


def test_without_a_prefill_replica_decode_computes_the_prompt_itself():
    placed = without_prefill().place(request(1, 1000), 0.0)
    assert (placed.prefill_replica, placed.decode_replica) == (None, "decode-0")
    assert placed.reason is PlacementReason.NO_PREFILL_REPLICA
    assert placed.predicted_ttft_s is None
    assert placed.ttft_budget_s == 2.0


def test_with_prefill_lost_decode_serves_alone_but_not_before_there_was_any():
    router = without_prefill(max_local=2)
    assert not router.serves(0.0)
    router.prefill_reported(report("prefill-0"), 0.0)
    assert router.is_ready(0.0)
    router.view.replica_gone(ReplicaGone(ReplicaId("prefill-0")))
    assert not router.is_ready(0.0)
    assert router.serves(0.0)
    router.view.replica_gone(ReplicaGone(ReplicaId("decode-0")))
    assert not router.serves(0.0)


def test_a_router_that_is_new_hears_from_decode_that_there_was_prefill():
    """It may be replaced while prefill is away, and so may never have heard of it."""
    router = without_prefill()
    router.view.decode_reported(DecodeReported(ReplicaId("decode-1"), 0.0, 0, has_pulled=True), 0.0)
    assert router.serves(0.0)
    assert not router.is_ready(0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-2"), 0.0, 0), 0.0)
    router.view.replica_gone(ReplicaGone(ReplicaId("decode-1")))
    assert router.serves(0.0), "one that came later has not met it"


def test_a_router_that_has_just_started_says_that_it_may_not_have_heard_of_all():
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(settle_s=3.0), started_s=10.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 11.0)
    assert (router.serves(12.9), router.is_settled(12.9)) == (False, False)
    assert (router.serves(13.0), router.is_settled(13.0)) == (False, True)


def test_where_decode_may_not_compute_prompts_nothing_is_served_without_prefill():
    router = without_prefill(max_local=0)
    router.prefill_reported(report("prefill-0"), 0.0)
    assert router.serves(0.0)
    router.view.replica_gone(ReplicaGone(ReplicaId("prefill-0")))
    assert not router.serves(0.0)


def test_no_more_prompts_than_decode_can_bear():
    router = without_prefill()
    assert isinstance(router.place(request(1, 10), 0.0), Placed)
    assert isinstance(router.place(request(2, 10), 0.0), Placed)
    assert router.place(request(3, 10), 0.0).reason is RejectionReason.BACKLOG
    assert isinstance(router.place(request(3, 10, is_admitted=True), 0.0), Placed)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0, kv_tokens=10_000), 0.0)
    assert router.place(request(4, 9_900), 0.0).reason is RejectionReason.BACKLOG
    assert isinstance(router.place(request(5, 10), 0.0), Placed)


def test_who_is_refused_for_want_of_prefill_has_taken_nothing():
    gates = TenantGates()
    gates.of("a", TenantLimit(output_tokens_per_s=1000.0))
    admission = AdmissionController(DEFAULT_TIERS, AdmissionRules(), gates, lambda: 1.0)
    router = without_prefill(max_local=1, gate=Gate(admission))
    for number, tenant in ((0, "b"), (1, "c")):
        assert isinstance(router.place(request(number, 10, tenant=tenant), 0.0), Placed)
    refused = router.place(request(2, 10, tenant="a", output_tokens=8000), 0.0)
    assert refused.reason is RejectionReason.BACKLOG
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0, kv_tokens=10_000), 0.0)
    assert isinstance(router.place(request(3, 10, tenant="a", output_tokens=8000), 0.0), Placed)


def with_a_backlog_of_the_lost(clock=21):
    """A fleet whose only prefill replica is gone, with what it had to compute left to decode."""
    gate = Gate(AdmissionController(DEFAULT_TIERS, AdmissionRules(), TenantGates(), lambda: 0.0))
    router = without_prefill(max_local=64, gate=gate)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 0.0)
    router.prefill_reported(report("prefill-0"), 0.0)
    for second in range(clock):
        assert isinstance(router.place(request(second, 1000, PREMIUM), float(second)), Placed)
    router.view.replica_gone(ReplicaGone(ReplicaId("prefill-0")))
    for number in range(clock):
        lost = ReplacementRequested(
            JobId(f"job-{number}"),
            PREMIUM,
            ttft_budget_s=None,
            explicit_deadline=False,
            tokens=1000,
            decode_replica=ReplicaId("decode-0"),
            failed_replicas=(ReplicaId("prefill-0"),),
            cause=FailureCause.REPLICA_DIED,
        )
        assert router.place(PlacementRequested.again(lost), float(clock)).prefill_replica is None
    return router, gate.admission


def test_without_a_prefill_replica_nobody_waits_for_what_that_had_to_do():
    router, admission = with_a_backlog_of_the_lost()
    placed = router.place(request(100, 1000, PREMIUM), 21.5)
    assert isinstance(placed, Placed)
    assert placed.prefill_replica is None
    assert admission.backlog_s(PREMIUM) == 0
    assert isinstance(router.place(request(101, 1000, BACKGROUND), 21.5), Placed)


def test_what_decode_has_computed_is_no_work_of_the_prefill_replica_that_comes_back():
    router, admission = with_a_backlog_of_the_lost()
    assert isinstance(router.place(request(100, 1000, PREMIUM), 30.0), Placed)
    router.prefill_reported(report("prefill-1"), 60.0)
    placed = router.place(request(101, 1000, PREMIUM), 60.0)
    assert placed.prefill_replica == "prefill-1"
    assert admission.backlog_s(PREMIUM) == pytest.approx(1.0), "its own"
    assert admission.demand(60.0)[1] == pytest.approx(1.0)


def test_what_arrived_before_the_loss_is_still_told_to_whoever_sizes_the_fleet():
    gate = Gate(AdmissionController(DEFAULT_TIERS, AdmissionRules(), TenantGates(), lambda: 0.0))
    router = without_prefill(max_local=64, gate=gate)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 0.0)
    router.prefill_reported(report("prefill-0"), 0.0)
    for second in range(10):
        router.place(request(second, 1000, PREMIUM), float(second))
        router.prefill_reported(report("prefill-0", ended=(JobId(f"job-{second}"),)), second + 1.0)
    before, _ = gate.admission.demand(10.0)
    router.view.replica_gone(ReplicaGone(ReplicaId("prefill-0")))
    assert isinstance(router.place(request(100, 1000, PREMIUM), 10.5), Placed)
    assert gate.admission.demand(11.0) == (pytest.approx(before, rel=0.1), 0.0)


def test_a_router_that_has_just_started_does_not_leave_prompts_to_decode():
    router = without_prefill(started_s=0.0)
    assert router.place(request(1, 10), 1.0).reason is RejectionReason.NOT_SETTLED
    assert isinstance(router.place(request(1, 10), 5.0), Placed)
