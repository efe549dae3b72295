"""Where failed prefills are placed again, and which replicas are usable."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from small_router import POLICIES, report

from router.core import RouterCore
from router.fleet.view import RouterLimits, usable
from router.messages import Placed, PlacementRequested
from router.placement.least_harm import LeastHarm
from slo.errors import Rejected, RejectionReason
from slo.replacement import FailureCause, ReplacementRequested
from slo.reports import DecodeReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

A, B, C, D = (ReplicaId(name) for name in "abcd")
SILENT_S, STALE_S = 1.5, 10.0


def core(*prefill, decode=(D,)):
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(STALE_S, silent_after_s=SILENT_S))
    for name in prefill:
        router.prefill_reported(report(name), 0.0)
    for name in decode:
        router.view.decode_reported(DecodeReported(name, 0.0, 0), 0.0)
    return router


def lost(*replicas, tier=STANDARD, budget_s=2.0, explicit=False, tokens=100, e2e_s=None):
    cause = FailureCause.REPLICA_DIED
    asked = ReplacementRequested(JobId("job"), tier, budget_s, explicit, tokens, D, tuple(replicas), cause)
    return PlacementRequested.again(replace(asked, explicit_e2e_s=e2e_s))


class TestWhereItGoes:
    def test_a_lost_replica_does_not_come_into_question_although_it_still_reports(self):
        assert core(A, B).place(lost(A), 0.0).prefill_replica == B
        assert core(A, B).place(lost(B), 0.0).prefill_replica == A

    def test_it_stays_with_its_decode_replica(self):
        router = core(A, decode=(C, D))
        router.view.decode_reported(DecodeReported(D, 0.9, 50), 0.0)
        assert router.place(lost(B), 0.0).decode_replica == D

    def test_the_router_need_not_have_heard_of_the_decode_replica(self):
        assert core(A, decode=()).place(lost(B), 0.0).decode_replica == D

    def test_without_another_replica_there_is_no_place(self):
        rejected = core(A).place(lost(A), 0.0)
        assert isinstance(rejected, Rejected)
        assert rejected.reason is RejectionReason.NO_REPLICA

    def test_an_impossible_deadline_is_refused_where_the_tier_may_be_shed(self):
        late = {"budget_s": 0.05, "explicit": True, "tokens": 1000}
        assert core(A).place(lost(B, **late), 0.0).reason is RejectionReason.DEADLINE_INFEASIBLE
        assert isinstance(core(A).place(lost(B, tier=PREMIUM, **late), 0.0), Placed)
        assert isinstance(core(A).place(lost(B, tier=BACKGROUND, budget_s=None), 0.0), Placed)

    def test_a_budget_that_the_client_did_not_name_leaves_room_for_the_request_itself(self):
        assert isinstance(core(A).place(lost(B, budget_s=-1.0, tokens=1000), 0.0), Placed)

    def test_but_never_beyond_an_end_that_it_did_name(self):
        """The prompt takes 1.1 s."""
        late = {"budget_s": -1.0, "tokens": 1000, "e2e_s": 1.0}
        assert core(A).place(lost(B, **late), 0.0).reason is RejectionReason.DEADLINE_INFEASIBLE
        assert isinstance(core(A).place(lost(B, tier=PREMIUM, **late), 0.0), Placed)
        assert isinstance(core(A).place(lost(B, **{**late, "e2e_s": 1.2}), 0.0), Placed)


class TestWhoIsHeardOf:
    def test_a_replica_that_falls_silent_is_avoided_before_it_is_stale(self):
        router = core(A, B)
        router.prefill_reported(report(B), 2.0)
        router.view.decode_reported(DecodeReported(D, 0.0, 0), 2.0)
        for _ in range(5):
            assert router.place(lost(C), 2.1).prefill_replica == B

    def test_when_all_are_silent_they_are_used_until_they_are_stale(self):
        assert isinstance(core(A, B).place(lost(C), 5.0), Placed)
        assert core(A, B).place(lost(C), STALE_S).reason is RejectionReason.NO_REPLICA

    def test_the_silent_are_better_than_the_one_that_lost_the_request(self):
        router = core(A, B)
        router.prefill_reported(report(B), 5.0)
        assert router.place(lost(B), 5.0).prefill_replica == A

    def test_a_draining_replica_gets_nothing_new(self):
        router = core(A, B)
        router.prefill_reported(report(A, draining=True), 0.0)
        assert {router.place(lost(C), 0.0).prefill_replica for _ in range(5)} == {B}
        router.prefill_reported(report(B, draining=True), 0.0)
        assert router.place(lost(C), 0.0).reason is RejectionReason.NO_REPLICA

    def test_a_draining_decode_replica_gets_nothing_new(self):
        router = core(A, decode=(C, D))
        router.view.decode_reported(DecodeReported(C, 0.0, 0, draining=True), 0.0)
        router.view.decode_reported(DecodeReported(D, 0.9, 50), 0.0)
        assert router.place(lost(B), 0.0).decode_replica == D

    def test_a_replica_that_was_said_to_be_lost_is_back_with_its_next_report(self):
        router = core(A)
        router.view.replica_gone(ReplicaGone(A))
        assert router.place(lost(B), 0.0).reason is RejectionReason.NO_REPLICA
        router.prefill_reported(report(A), 0.1)
        assert router.place(lost(B), 0.1).prefill_replica == A

    @given(
        st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=6),
        st.sets(st.integers(0, 5)),
    )
    def test_whoever_is_usable_is_known_not_draining_and_not_lost(self, heard, lost_numbers):
        class One:
            def __init__(self, number, silent_s, draining):
                self.replica_id = number
                self.reported_at_s = 100 - silent_s
                self.draining = draining

        fleet = [One(number, *it) for number, it in enumerate(heard)]
        eligible = [
            one
            for one in fleet
            if not one.draining and 100 - one.reported_at_s < STALE_S and one.replica_id not in lost_numbers
        ]
        limits = RouterLimits(STALE_S, silent_after_s=SILENT_S)
        chosen = usable(fleet, 100.0, limits, lost_numbers)
        assert set(chosen) <= set(eligible)
        assert bool(chosen) == bool(eligible)
        fresh = [one for one in eligible if 100 - one.reported_at_s < SILENT_S]
        assert not fresh or chosen == fresh
        assert usable(fleet, 100.0, RouterLimits(STALE_S), lost_numbers) == eligible
