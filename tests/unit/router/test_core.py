import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.admission import Gate
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import Answered, JobEnded, Placed, PlacementReason, PlacementRequested
from router.placement.least_harm import LeastHarm
from router.placement.policies import NewPrefill
from slo.admission.controller import AdmissionController, AdmissionRules
from slo.admission.tenant_limits import TenantGates, TenantLimit
from slo.admission.tenants import ANONYMOUS
from slo.errors import Rejected, RejectionReason
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.replacement import FailureCause, ReplacementRequested
from slo.reports import AwaitedKv, DecodeReported, OutstandingJob, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, ObjectiveName, Tier, TierPolicy

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0, handoff_s=0.1)
POLICIES = {
    PREMIUM: TierPolicy(0.5, None, sheddable=False, weight=4.0),
    STANDARD: TierPolicy(2.0, None, sheddable=True, weight=2.0),
    BACKGROUND: TierPolicy(None, None, sheddable=True, weight=1.0),
}


def core(prefill=2, decode=1, now_s=0.0, stale_after_s=100.0):
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=stale_after_s))
    for n in range(prefill):
        router.prefill_reported(report(f"prefill-{n}"), now_s)
    for n in range(decode):
        router.view.decode_reported(DecodeReported(ReplicaId(f"decode-{n}"), 0.0, 0), now_s)
    return router


def report(replica, *jobs, **rest):
    return PrefillReported(ReplicaId(replica), LINE, tuple(jobs), rest.pop("running", None), 0.0, **rest)


def request(number, tokens, tier=STANDARD, ttft_s=..., explicit=False, **rest):
    objective = Objective(tier, POLICIES[tier].ttft_s if ttft_s is ... else ttft_s, None)
    return PlacementRequested(JobId(f"job-{number}"), objective, explicit, tokens, 0, **rest)


def admitted(*replicas, max_backlog_s=100.0):
    """A router that admits, without a limit that matters, and its admission."""
    rules = AdmissionRules(max_backlog_s=max_backlog_s, max_late_backlog_s=max_backlog_s)
    admission = AdmissionController(DEFAULT_TIERS, rules, TenantGates({}), lambda: 1.0)
    limits = RouterLimits(stale_after_s=10.0)
    router = RouterCore(DEFAULT_TIERS, LeastHarm(), limits, 0.0, gate=Gate(admission))
    for name in replicas:
        router.prefill_reported(report(name), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 0.0)
    return router, admission


def runs(number, tokens, tier=PREMIUM):
    return OutstandingJob(JobId(f"job-{number}"), tier, tokens, None, tokens * LINE.per_token_s)


def placed_again(number, tokens, *failed):
    asked = ReplacementRequested(
        JobId(f"job-{number}"),
        PREMIUM,
        None,
        explicit_deadline=False,
        tokens=tokens,
        decode_replica=ReplicaId("decode-0"),
        failed_replicas=failed,
        cause=FailureCause.SILENT,
    )
    return PlacementRequested.again(asked)


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_prefill_that_ended_with_its_replica_is_no_backlog(is_silent, is_named):
    router, admission = admitted("a")
    router.place(request(1, 1000, PREMIUM), 0.0)
    if is_named:
        router.prefill_reported(report("a", runs(1, 1000)), 0.1)
    if not is_silent:
        router.replica_gone(ReplicaGone(ReplicaId("a")), 1.0)
    router.prefill_reported(report("b"), 4.0)
    assert admission.backlog_s(PREMIUM) == 1.0, "it may yet ask for another place"
    for at_s in range(5, 50 if is_silent else 8):
        router.prefill_reported(report("b"), float(at_s))
    assert admission.backlog_s(PREMIUM) == 0.0


def test_a_lost_prefill_that_is_placed_again_is_backlog_until_it_ends():
    router, admission = admitted("a", "b")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    router.replica_gone(ReplicaGone(first), 1.0)
    other = router.place(placed_again(1, 1000, first), 3.0).prefill_replica
    for at_s in range(3, 60):
        router.prefill_reported(report(other, runs(1, 1000)), float(at_s))
    assert admission.backlog_s(PREMIUM) == 1.0
    router.prefill_reported(report(other, ended=(JobId("job-1"),)), 60.0)
    assert admission.backlog_s(PREMIUM) == 0.0


def test_the_end_of_an_earlier_attempt_is_not_that_of_the_prefill():
    router, admission = admitted("a", "b")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    router.prefill_reported(report(first, runs(1, 1000)), 0.1)
    other = router.place(placed_again(1, 1000, first), 3.0).prefill_replica
    assert other != first
    router.prefill_reported(report(first, ended=(JobId("job-1"),)), 4.0)
    assert admission.backlog_s(PREMIUM) == 1.0
    router.prefill_reported(report(other, ended=(JobId("job-1"),)), 5.0)
    assert admission.backlog_s(PREMIUM) == 0.0


def test_where_the_router_placed_it_again_in_vain_its_end_elsewhere_is_that_of_the_prefill():
    router, admission = admitted("a", "b", "c")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    router.prefill_reported(report(first, runs(1, 1000)), 0.1)
    told = router.place(placed_again(1, 1000, first), 1.0).prefill_replica
    router.prefill_reported(report(first, ended=(JobId("job-1"),)), 1.0)
    assert admission.backlog_s(PREMIUM) == 1.0
    (chosen,) = {"a", "b", "c"} - {first, told}
    router.prefill_reported(report(chosen, runs(1, 1000)), 1.1)
    router.prefill_reported(report(chosen, ended=(JobId("job-1"),)), 2.1)
    assert admission.backlog_s(PREMIUM) == 0.0


def test_nor_does_it_wait_where_the_chosen_replica_is_done_between_two_reports():
    router, admission = admitted("a", "b", "c")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    told = router.place(placed_again(1, 1000, first), 1.0).prefill_replica
    (chosen,) = {"a", "b", "c"} - {first, told}
    router.prefill_reported(report(chosen, ended=(JobId("job-1"),)), 1.9)
    for at_s in range(2, 8):
        for name in (first, told, chosen):
            router.prefill_reported(report(name), float(at_s))
    assert admission.backlog_s(PREMIUM) == 0.0


def test_a_replica_that_stalled_does_not_bring_back_a_prefill_that_is_done():
    router, admission = admitted("a", "b")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    other = router.place(placed_again(1, 1000, first), 2.6).prefill_replica
    router.prefill_reported(report(other, runs(1, 1000)), 2.7)
    router.prefill_reported(report(other, ended=(JobId("job-1"),)), 4.0)
    router.prefill_reported(report(first, runs(1, 1000)), 4.5)
    router.prefill_reported(report(first, ended=(JobId("job-1"),)), 4.6)
    assert admission.backlog_s(PREMIUM) == 0.0


def test_what_is_placed_again_after_its_end_is_not_kept(monkeypatch):
    monkeypatch.setattr("router.core._MAX_AGAIN", 10, raising=False)
    router, admission = admitted("a", "b")
    for number in range(50):
        first = router.place(request(number, 10, PREMIUM), 0.0).prefill_replica
        router.job_ended(JobEnded(JobId(f"job-{number}")), 0.0)
        other = router.place(placed_again(number, 10, first), 0.0).prefill_replica
    assert len(router._again) <= 10
    router.prefill_reported(report(other, runs(49, 10)), 0.1)
    router.prefill_reported(report(first, ended=(JobId("job-49"),)), 0.2)
    assert admission.backlog_s(PREMIUM) == pytest.approx(0.01), "the latest are"


def test_a_router_that_starts_anew_admits_no_second_queue():
    first, admission = admitted("a", max_backlog_s=20.0)
    placed = []
    while isinstance(first.place(request(len(placed), 1000, BACKGROUND), 0.0), Placed):
        placed.append(len(placed))
    queue = [runs(number, 1000, BACKGROUND) for number in placed]
    anew, admission = admitted(max_backlog_s=20.0)
    anew.prefill_reported(report("a", *queue, runs("unknown", 1000, Tier("unknown"))), 1.0)
    assert admission.backlog_s(BACKGROUND) == pytest.approx(len(queue))
    more = 0
    while isinstance(anew.place(replace(request(f"new-{more}", 1000, BACKGROUND), tenant="b"), 1.0), Placed):
        more += 1
    assert len(queue) + more <= 41, "a tenant with nothing of it has its part"
    anew.prefill_reported(report("a", *queue[5:], ended=tuple(job.job_id for job in queue[:3])), 2.0)
    assert admission.backlog_s(BACKGROUND) == pytest.approx(len(queue) - 5 + more)
    for number in range(5, 10):
        anew.job_ended(JobEnded(JobId(f"job-{number}")), 3.0)
    assert admission.backlog_s(BACKGROUND) == pytest.approx(len(queue) - 10 + more)


def test_what_a_slow_replica_has_counts_as_on_the_fastest():
    router, admission = admitted("fast")
    slow = LINE.times(4.0)
    half_s = slow.work_s(1000) / 2
    queue = [OutstandingJob(JobId(f"job-{number}"), PREMIUM, 1000, None, half_s) for number in range(3)]
    told = PrefillReported(ReplicaId("slow"), slow, tuple(queue), None, 0.0)
    router.prefill_reported(told, 1.0)
    assert admission.backlog_s(PREMIUM) == pytest.approx(3 * LINE.work_s(1000) / 2), "each is half done"


def test_a_prefill_that_is_done_again_waits_again_but_not_since_it_came():
    router, admission = admitted("a", "b")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    router.prefill_reported(report(first, ended=(JobId("job-1"),)), 1.0)
    assert admission.backlog_s(PREMIUM) == 0.0
    for name in ("a", "b"):
        router.prefill_reported(report(name), 299.0)
    other = router.place(placed_again(1, 1000, first), 300.0).prefill_replica
    router.prefill_reported(report(other, runs(1, 1000)), 300.1)
    assert admission.backlog_s(PREMIUM) == 1.0
    assert admission._backlog.oldest(PREMIUM).admitted_s == 300.1
    router.prefill_reported(report(other), 301.0)
    assert admission.backlog_s(PREMIUM) == 0.0


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


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ({"prompt_tokens": 500_000}, 4096),
        ({"prompt_tokens": None, "prompt_bytes": 2_000_000}, 4096),
        ({"prompt_tokens": 500_000, "prompts": 16}, 16 * 4096),
        ({"prompt_tokens": 16 * 4000, "prompts": 16}, 16 * 4000),
    ],
)
def test_a_prompt_is_no_more_work_than_the_model_takes(size, tokens):
    rules, limits = AdmissionRules(max_backlog_s=100.0), RouterLimits(stale_after_s=100.0, longest=4096)
    gate = Gate(AdmissionController(DEFAULT_TIERS, rules, TenantGates({}), lambda: 1.0))
    router = RouterCore(POLICIES, LeastHarm(), limits, gate=gate)
    router.prefill_reported(report("prefill-0"), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 0.0)
    placed = router.place(replace(request(1, 1, BACKGROUND), **size), 0.0)
    assert placed.tokens == tokens
    assert isinstance(router.place(request(2, 100, BACKGROUND), 0.0), Placed)


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
    limits = TenantGates({"a": TenantLimit(output_tokens_per_s=1000.0)})
    admission = AdmissionController(DEFAULT_TIERS, AdmissionRules(), limits, lambda: 1.0)
    router = without_prefill(max_local=1, gate=Gate(admission))
    for number, tenant in ((0, "b"), (1, "c")):
        assert isinstance(router.place(request(number, 10, tenant=tenant), 0.0), Placed)
    refused = router.place(request(2, 10, tenant="a", output_tokens=8000), 0.0)
    assert refused.reason is RejectionReason.BACKLOG
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0, kv_tokens=10_000), 0.0)
    assert isinstance(router.place(request(3, 10, tenant="a", output_tokens=8000), 0.0), Placed)


def with_a_backlog_of_the_lost(clock=21):
    """A fleet whose only prefill replica is gone, with what it had to compute left to decode."""
    gate = Gate(AdmissionController(DEFAULT_TIERS, AdmissionRules(), TenantGates({}), lambda: 0.0))
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
    gate = Gate(AdmissionController(DEFAULT_TIERS, AdmissionRules(), TenantGates({}), lambda: 0.0))
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


def test_one_that_is_placed_again_in_vain_is_still_its_tenants():
    limits = TenantGates({"a": TenantLimit(max_concurrent=1)})
    admission = AdmissionController(DEFAULT_TIERS, AdmissionRules(), limits, lambda: 1.0)
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=100.0), gate=Gate(admission))
    router.prefill_reported(report("prefill-0"), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 0.0)
    assert isinstance(router.place(request(1, 1000, tenant="a"), 0.0), Placed)
    late = request(1, 1000, tenant="a", ttft_s=0.01, explicit=True, is_admitted=True)
    assert router.place(late, 0.0).reason is RejectionReason.DEADLINE_INFEASIBLE
    assert router.place(request(2, 10, tenant="a"), 0.0).reason is RejectionReason.CONCURRENCY
    router.job_ended(JobEnded(JobId("job-1"), None), 0.0)
    assert isinstance(router.place(request(3, 10, tenant="a"), 0.0), Placed)


def test_what_decode_computes_itself_says_nothing_of_the_way():
    router = core(prefill=1)
    for number in range(8):
        at_s = 10.0 * number
        router.prefill_reported(report("prefill-0"), at_s)
        router.place(request(number, 1000), at_s)
        router.not_for_prefill(JobId(f"job-{number}"))
        router.job_ended(JobEnded(JobId(f"job-{number}"), 9.0), at_s + 9)
    router.prefill_reported(report("prefill-0"), 90.0)
    placed = router.place(request(8, 1000, explicit=True), 90.0)
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s == pytest.approx(1.1)


def test_members_of_a_suspended_step_do_not_end_with_the_running_pass():
    jobs = (
        OutstandingJob(JobId("L"), BACKGROUND, 3000, None, 3.0),
        OutstandingJob(JobId("M"), BACKGROUND, 0, 9.0, 0.0),
        OutstandingJob(JobId("S1"), STANDARD, 500, 60.0, 0.5),
        OutstandingJob(JobId("S2"), STANDARD, 0, 5.0, 0.0),
    )
    router = core()
    router.prefill_reported(report("prefill-0", *jobs, running=JobId("L")), 0.0)
    work = router.view.prefill[ReplicaId("prefill-0")].outstanding(0.0)
    assert work.runner.deadline_s == 9.0
    assert [prefill.job_id for prefill in work.waiting] == ["S1", "S2"]


def test_a_job_of_a_tier_that_only_its_replica_knows_is_in_nobodys_way():
    router = core(prefill=1)
    other = OutstandingJob(JobId("other"), Tier("other"), 1000, None, 1.0)
    router.prefill_reported(report("prefill-0", other), 0.0)
    assert isinstance(router.place(request(1, 100), 0.0), Placed)


def test_a_router_that_has_just_started_does_not_leave_prompts_to_decode():
    router = without_prefill(started_s=0.0)
    assert router.place(request(1, 10), 1.0).reason is RejectionReason.NOT_SETTLED
    assert isinstance(router.place(request(1, 10), 5.0), Placed)


def test_what_decode_computes_for_its_several_answers_is_in_no_prefix_cache_of_prefill():
    router, prompt = core(prefill=1), {"prefix_hashes": (1, 2, 3), "hash_block": 128}
    router.place(request(1, 400, answers_per_prompt=2, only_decode=True, **prompt), 0.0)
    assert router.place(request(2, 400, **prompt), 0.0).cached_tokens == 0
    assert router.place(request(3, 400, **prompt), 0.0).cached_tokens == 384


def test_replicas_without_a_prefix_cache_are_expected_to_have_nothing_in_it():
    router = core()
    names, prompt = ["prefill-0", "prefill-1"], {"prefix_hashes": tuple(range(7)), "hash_block": 128}
    about = {"kv_tokens": 100_000, "caches_prefixes": False}
    for name in names:
        router.prefill_reported(report(name, **about), 0.0)
    for number in range(20):
        pair = [router.place(request(f"{number}-{n}", 1000, **prompt), 0.0) for n in range(2)]
        assert [placed.cached_tokens for placed in pair] == [0, 0]
        assert sorted(placed.prefill_replica for placed in pair) == names
        for n, placed in enumerate(pair):
            job = JobId(f"job-{number}-{n}")
            ended = report(placed.prefill_replica, hits=((job, 0),), ended=(job,), **about)
            router.prefill_reported(ended, 0.0)


def test_a_replica_that_failed_the_request_is_not_used_for_it_again():
    router = core(decode=2)
    failed = (ReplicaId("decode-0"),)
    assert router.place(request(1, 10, failed_replicas=failed), 0.0).decode_replica == "decode-1"
    both = (*failed, ReplicaId("decode-1"))
    assert router.place(request(1, 10, failed_replicas=both), 0.0).reason is RejectionReason.NO_REPLICA


def test_what_has_begun_is_placed_however_late_it_will_be():
    late = {"ttft_s": 0.01, "explicit": True}
    assert core().place(request(1, 1000, **late), 0.0).reason is RejectionReason.DEADLINE_INFEASIBLE
    assert isinstance(core().place(request(1, 1000, **late, however_late=True), 0.0), Placed)


def test_one_that_is_late_everywhere_does_not_wait_for_work_without_a_deadline():
    router = core(prefill=1)
    jobs = [OutstandingJob(JobId(f"batch-{n}"), BACKGROUND, 1000, None, 1.0) for n in range(30)]
    router.prefill_reported(report("prefill-0", *jobs), 0.0)
    placed = router.place(request(1, 2500), 0.0)
    assert isinstance(placed, Placed), "a tier's own objective is stretched to twice what it takes alone"
    assert placed.predicted_ttft_s == pytest.approx(2.5 + 0.1)


def test_an_idle_fleet_is_predicted_exactly():
    placed = core().place(request(1, 1000), 0.0)
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s == pytest.approx(1.0 + 0.1)
    assert placed.slack_s == pytest.approx(2.0 - 1.1)
    assert placed.handoff_s == 0.1
    assert placed.reason is PlacementReason.NOBODY_LATE


def test_the_way_is_learned_from_requests_that_found_an_idle_replica():
    router = core(prefill=1)
    for number in range(8):
        at_s = 10.0 * number
        router.prefill_reported(report("prefill-0"), at_s)
        placed = router.place(request(number, 1000), at_s)
        queued = router.place(request(f"{number}-queued", 1000, tier=PREMIUM), at_s)
        assert queued.predicted_ttft_s > 1.5
        router.job_ended(JobEnded(JobId(f"job-{number}-queued"), 9.0), at_s + 1)
        router.job_ended(JobEnded(JobId(f"job-{number}"), 1.0 + 0.03), at_s + 1)
    assert router.place(request(8, 1000), 90.0).predicted_ttft_s == pytest.approx(1.03)
    assert placed.handoff_s == 0.1, "what prefill leaves for the way back is as reported"


def after_slow_first_tokens(slow):
    """A router on whose idle replica every request so far got its first token after 3 s."""
    router = core(prefill=1, stale_after_s=1000.0)
    for number in range(slow):
        assert isinstance(router.place(request(f"slow-{number}", 100), float(number)), Placed)
        router.prefill_reported(report("prefill-0", ended=(JobId(f"job-slow-{number}"),)), number + 0.1)
        router.job_ended(JobEnded(JobId(f"job-slow-{number}"), ttft_s=3.0), number + 0.2)
    return router


@pytest.mark.parametrize("slow", [1, 32])
def test_a_slow_way_does_not_have_requests_refused_for_good(slow):
    router = after_slow_first_tokens(slow)
    refused = []
    for number in range(slow, slow + 200):
        router.prefill_reported(report("prefill-0"), float(number))
        asked = request(number, 100, ttft_s=0.5, explicit=True)
        if isinstance(router.place(asked, float(number)), Rejected):
            refused.append(number - slow)
        else:
            router.prefill_reported(report("prefill-0", ended=(asked.job_id,)), number + 0.1)
            router.job_ended(JobEnded(asked.job_id, ttft_s=0.2), number + 0.2)
    assert max(refused, default=0) < (10 if slow == 1 else 100)


def test_one_request_at_a_time_tries_a_way_that_is_too_slow():
    router = after_slow_first_tokens(4)
    decided = [router.place(request(n, 100, ttft_s=0.5, explicit=True), 100.0) for n in range(10)]
    assert [type(one) for one in decided] == [Placed] + [Rejected] * 9
    assert isinstance(router.place(request(10, 100, ttft_s=0.5, explicit=True), 110.0), Rejected), (
        "no idle one"
    )
    router.job_ended(JobEnded(JobId("job-0")), 111.0)
    hopeless = request(11, 100, ttft_s=0.15, explicit=True)
    assert isinstance(router.place(hopeless, 111.0), Rejected), "late whatever the way takes"
    assert isinstance(router.place(request(12, 100, ttft_s=0.5, explicit=True), 111.0), Placed)


def test_a_text_is_not_refused_for_good_for_the_length_of_earlier_ones():
    router = core(prefill=1, stale_after_s=1000.0)
    dense = tuple((ANONYMOUS.name, 1000, 700) for _ in range(60))
    router.prefill_reported(report("prefill-0", learned=dense), 0.0)
    placed = []
    for number in range(100):
        text = replace(request(number, None, ttft_s=3.0, explicit=True), prompt_bytes=8000)
        if isinstance(router.place(text, float(number)), Placed):
            placed.append(number)
            learned = ((ANONYMOUS.name, 8000, 2000),)
            ended = report("prefill-0", ended=(text.job_id,), learned=learned)
            router.prefill_reported(ended, number + 0.5)
            router.job_ended(JobEnded(text.job_id, ttft_s=2.1), number + 0.6)
    assert placed[:3] == [0, 5, 10], "too long by what is known of its tenant's texts"
    assert placed[-15:] == [*range(85, 100)], "learned from those that were let in"


def test_a_text_is_refused_that_would_be_late_as_any_text():
    router = core(prefill=1, stale_after_s=1000.0)
    dense = tuple((ANONYMOUS.name, 1000, 700) for _ in range(60))
    router.prefill_reported(report("prefill-0", learned=dense), 0.0)
    for number in range(20):
        text = replace(request(number, None, ttft_s=1.5, explicit=True), prompt_bytes=8000)
        assert isinstance(router.place(text, 10.0 * number), Rejected)
        known = request(f"known-{number}", 3000, ttft_s=3.0, explicit=True)
        assert isinstance(router.place(known, 10.0 * number), Rejected), "its length is no estimate"


def ends_in(e2e_s, number=1, *, output_tokens=1000, **objective):
    asked = replace(Objective(STANDARD, None, None, e2e_s=e2e_s), **objective)
    return PlacementRequested(JobId(f"e2e-{number}"), asked, False, 1000, 0, output_tokens=output_tokens)


def test_the_first_token_is_due_as_early_as_the_rest_of_the_answer_takes():
    router = core()
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 1, tpot_s=0.01), 0.0)
    guessed = router.place(ends_in(10.0), 0.0)
    assert guessed.ttft_budget_s < 10.0 - 255 * 0.01, "a stream beside another is slower"
    for number in range(20):
        router.job_ended(JobEnded(JobId(f"{number}"), answered=Answered(STANDARD, "anonymous", 601)), 0.0)
    learned = router.place(ends_in(10.0, 2), 0.0)
    assert learned.ttft_budget_s < 10.0 - 600 * 0.01
    assert learned.promised_ttft_s is None, "what is judged is the end"
    short = router.place(ends_in(10.0, 3, output_tokens=11), 0.0)
    assert short.ttft_budget_s == pytest.approx(10.0 - 10 * router.view.decode["decode-0"].pace.tpot_s(4))
    both = router.place(ends_in(10.0, 4, ttft_s=2.5, output_tokens=11), 0.0)
    assert (both.ttft_budget_s, both.promised_ttft_s) == (2.5, 2.5)


def test_the_answers_to_several_prompts_end_together():
    router = core()
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 1, tpot_s=0.03), 0.0)
    placed = router.place(replace(ends_in(2.0, output_tokens=128), prompts=8, answers_per_prompt=2), 0.0)
    assert placed.ttft_budget_s == pytest.approx(2.0 - 7 * router.view.decode["decode-0"].pace.tpot_s(2))
    assert placed.ttft_budget_s > 1.6


def test_an_answer_that_must_end_soon_is_decoded_where_it_can():
    router = core(decode=2)
    for replica, tpot_s in (("decode-0", 0.05), ("decode-1", 0.01)):
        router.view.decode_reported(DecodeReported(ReplicaId(replica), 0.0, 1, tpot_s=tpot_s), 0.0)
    assert router.place(ends_in(100.0, 1), 0.0).decode_replica == "decode-0"
    for number in range(2, 4):
        assert router.place(ends_in(10.0, number), 0.0).decode_replica == "decode-1"


def test_the_end_of_an_answer_that_is_due_too_soon_is_no_reason_to_give_up_its_first_token():
    router = core()
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 1, tpot_s=0.1), 0.0)
    placed = router.place(ends_in(20.0), 0.0)
    assert placed.ttft_budget_s == pytest.approx(2.0), "a tenth of it"
    assert isinstance(placed, Placed)


def test_work_goes_where_it_ends_first():
    router = core()
    first = router.place(request(1, 1000), 0.0)
    second = router.place(request(2, 1000), 0.0)
    assert first.prefill_replica != second.prefill_replica


def test_an_urgent_request_is_predicted_to_overtake_waiting_ones():
    router = core(prefill=1)
    router.place(request(1, 1500, BACKGROUND), 0.0)
    router.place(request(2, 1500, BACKGROUND), 0.0)
    urgent = router.place(request(3, 100, PREMIUM), 0.0)
    assert urgent.predicted_ttft_s == pytest.approx(0.1 + 0.1)


def test_it_does_not_overtake_the_one_that_runs():
    router = core(prefill=1)
    running = OutstandingJob(JobId("job-1"), BACKGROUND, 1500, None)
    router.prefill_reported(report("prefill-0", running, running=JobId("job-1")), 0.0)
    urgent = router.place(request(3, 100, PREMIUM), 0.5)
    assert urgent.predicted_ttft_s == pytest.approx(1.0 + 0.1 + 0.1)


def test_a_place_that_makes_others_late_is_avoided():
    router = core(prefill=2)
    tight = OutstandingJob(JobId("tight"), PREMIUM, 1000, 1.05)
    long = OutstandingJob(JobId("long"), BACKGROUND, 500, None)
    router.prefill_reported(report("prefill-0", tight), 0.0)
    router.prefill_reported(report("prefill-1", long, running=JobId("long")), 0.0)
    placed = router.place(request(1, 300, ttft_s=1.0, explicit=True), 0.0)
    assert placed.prefill_replica == "prefill-1"
    assert placed.reason is PlacementReason.NOBODY_LATE


def test_when_somebody_must_be_late_the_least_valuable_lateness_is_chosen():
    router = core(prefill=2)
    premium = OutstandingJob(JobId("premium"), PREMIUM, 1000, 1.05)
    standard = OutstandingJob(JobId("standard"), STANDARD, 1000, 1.05)
    router.prefill_reported(report("prefill-0", premium), 0.0)
    router.prefill_reported(report("prefill-1", standard), 0.0)
    placed = router.place(request(1, 300, ttft_s=1.0, explicit=True), 0.0)
    assert placed.prefill_replica == "prefill-1"
    assert placed.reason is PlacementReason.LEAST_HARM


def test_a_deadline_that_cannot_be_met_even_alone_is_refused_behind_the_backlog():
    router = core(prefill=1)
    assert router.place(request(1, 100, ttft_s=0.15, explicit=True), 0.0) == Rejected(
        RejectionReason.DEADLINE_INFEASIBLE,
        pytest.approx(0.05),
        pytest.approx(0.2),
        0.15,
        unattainable=(ObjectiveName.TTFT,),
    )
    router.place(request(2, 1000, ttft_s=10.0), 0.0)
    behind = router.place(request(3, 100, ttft_s=0.15, explicit=True), 0.0)
    assert behind.retry_after_s == pytest.approx(1.05)


def test_lost_requests_do_not_stand_in_the_way_of_one_that_can_be_met():
    router = core(prefill=1)
    for n in range(5):
        router.place(request(n, 1000, PREMIUM), 0.0)
    placed = router.place(request(9, 500, ttft_s=2.0, explicit=True), 0.0)
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s == pytest.approx(0.5 + 0.1)


def test_a_router_that_has_just_started_refuses_nobody():
    router = RouterCore(POLICIES, LeastHarm(), started_s=100.0)
    assert router.place(request(1, 10), 101.0).reason is RejectionReason.NOT_SETTLED
    assert router.place(request(1, 10), 104.0).reason is RejectionReason.NO_REPLICA


def test_retry_after_is_the_backlog_that_has_to_go_first():
    router = core(prefill=1)
    running = OutstandingJob(JobId("long"), BACKGROUND, 30_000, None)
    router.prefill_reported(report("prefill-0", running, running=JobId("long")), 0.0)
    decision = router.place(request(1, 1000, ttft_s=2.0, explicit=True), 0.0)
    assert decision.retry_after_s == pytest.approx(30.0 + 1.0 + 0.1 - 2.0)
    assert isinstance(router.place(request(1, 1000, ttft_s=2.0, explicit=True), 29.2), Placed)


def test_premium_is_never_shed():
    router = core(prefill=1)
    running = OutstandingJob(JobId("long"), BACKGROUND, 30_000, None)
    router.prefill_reported(report("prefill-0", running, running=JobId("long")), 0.0)
    assert isinstance(router.place(request(1, 100, PREMIUM), 0.0), Placed)


def test_a_tiers_own_objective_does_not_forbid_long_prompts():
    router = core(prefill=1)
    assert isinstance(router.place(request(1, 20_000), 0.0), Placed), "late, but nobody asked for 2 s"
    assert isinstance(router.place(request(2, 20_000, explicit=True), 0.0), Rejected)
    behind = router.place(request(3, 19_000), 0.0)
    assert isinstance(behind, Rejected), "but it does not queue behind twice its own time"


def test_without_replicas_there_is_no_place():
    for router in (core(prefill=0), core(decode=0)):
        assert router.place(request(1, 10), 0.0).reason is RejectionReason.NO_REPLICA
    silent = core(stale_after_s=10.0)
    assert silent.place(request(1, 10), 9.0).prefill_replica == "prefill-0"
    assert silent.place(request(1, 10), 60.0).reason is RejectionReason.NO_REPLICA


def test_a_budget_partly_spent_counts_from_arrival():
    placed = core().place(request(1, 1000, elapsed_s=0.3), 10.0)
    assert placed.predicted_ttft_s == pytest.approx(0.3 + 1.0 + 0.1)


def test_a_scaled_objective_resolves_to_the_idle_prefill_time():
    router = core()
    objective = Objective(STANDARD, None, None, ttft_scale=1.3)
    placed = router.place(PlacementRequested(JobId("a"), objective, False, 1000, 0), 0.0)
    assert placed.ttft_budget_s == pytest.approx(1.3)


def test_text_is_sized_by_the_learned_ratio():
    router = core()
    for _ in range(300):
        router.prefill_reported(report("prefill-0", learned=((ANONYMOUS.name, 2000, 1000),)), 0.0)
    placed = router.place(
        PlacementRequested(JobId("a"), Objective(BACKGROUND, None, None), False, None, 500), 0
    )
    assert placed.tokens == pytest.approx(250, rel=0.02)
    assert placed.slack_s == math.inf


@pytest.mark.parametrize("learned", [("acme", 17, 0), ("acme", 0, 17), ("acme", 17, -1)])
def test_a_prompt_without_a_length_teaches_nothing_and_the_report_holds(learned):
    router = core()
    assert router.prefill_reported(report("prefill-0", learned=(learned, ("acme", 40, 10))), 7.0) == (0.0,)
    assert router.view.prefill[ReplicaId("prefill-0")].reported_at_s == 7.0


def test_decode_goes_to_the_emptiest_cache():
    router = core(decode=0)
    router.view.decode_reported(DecodeReported(ReplicaId("full"), 0.8, 0), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("empty"), 0.1, 5), 0.0)
    assert router.place(request(1, 10), 0.0).decode_replica == "empty"


def test_about_equally_empty_decode_replicas_share():
    router = core(decode=2)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-1"), 0.01, 0), 0.0)
    chosen = {router.place(request(n, 10), 0.0).decode_replica for n in range(2)}
    assert chosen == {"decode-0", "decode-1"}


def test_a_report_replaces_what_it_knows_and_keeps_what_is_on_its_way():
    router = core(prefill=1)
    router.place(request(1, 1000), 0.0)
    router.prefill_reported(report("prefill-0"), 0.1)
    assert set(router.view.prefill["prefill-0"].jobs) == {"job-1"}, "still on its way"
    seen = OutstandingJob(JobId("job-1"), STANDARD, 900, 1.5)
    router.prefill_reported(report("prefill-0", seen), 0.2)
    assert router.view.prefill["prefill-0"].outstanding_tokens == 900, "the exact length"
    router.prefill_reported(report("prefill-0"), 0.3)
    assert not router.view.prefill["prefill-0"].jobs, "it was there and is gone"
    router.place(request(2, 1000), 1.0)
    router.prefill_reported(report("prefill-0"), 7.0)
    assert not router.view.prefill["prefill-0"].jobs, "it never arrived"


def test_a_replica_that_is_gone_gets_nothing_until_it_reports_again():
    router = core(prefill=2)
    router.view.replica_gone(ReplicaGone(ReplicaId("prefill-0")))
    assert {router.place(request(n, 10), 0.0).prefill_replica for n in range(4)} == {"prefill-1"}
    router.view.replica_gone(ReplicaGone(ReplicaId("decode-0")))
    assert router.place(request(9, 10), 0.0).reason is RejectionReason.NO_REPLICA
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 1.0)
    assert isinstance(router.place(request(10, 10), 1.0), Placed)


def test_a_fast_prefill_may_end_between_two_reports():
    router = core(prefill=1)
    router.place(request(1, 10), 0.0)
    router.prefill_reported(report("prefill-0", ended=(JobId("job-1"),)), 0.1)
    assert not router.view.prefill["prefill-0"].jobs


class RouterMachine(RuleBasedStateMachine):
    """Placements, reports and departures in any order: no job is counted twice or for ever."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=1e9))
        self.truth = {f"prefill-{n}": {} for n in range(3)}
        self.on_the_way = {}
        self.number = 0
        for name in self.truth:
            self.router.prefill_reported(report(name), 0.0)
        self.router.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)

    @rule(tokens=st.integers(1, 5000), tier=st.sampled_from(DEFAULT_TIERS.names))
    def place(self, tokens, tier):
        self.number += 1
        decision = self.router.place(request(self.number, tokens, tier), self.now_s)
        if isinstance(decision, Placed):
            self.on_the_way[f"job-{self.number}"] = (decision.prefill_replica, tier, tokens)

    @rule(dt=st.floats(0.001, 2.0))
    def wait(self, dt):
        self.now_s += dt

    @rule(data=st.data())
    def arrive(self, data):
        if self.on_the_way:
            job = data.draw(st.sampled_from(sorted(self.on_the_way)))
            replica, tier, tokens = self.on_the_way.pop(job)
            self.truth[replica][job] = OutstandingJob(JobId(job), tier, tokens, 1.0)
            self.say(replica)

    @rule(data=st.data())
    def finish(self, data):
        busy = sorted(name for name, jobs in self.truth.items() if jobs)
        if busy:
            replica = data.draw(st.sampled_from(busy))
            job = data.draw(st.sampled_from(sorted(self.truth[replica])))
            del self.truth[replica][job]
            self.say(replica, ended=(JobId(job),))

    @rule(data=st.data())
    def client_leaves(self, data):
        if self.on_the_way:
            job = data.draw(st.sampled_from(sorted(self.on_the_way)))
            del self.on_the_way[job]
            self.router.job_ended(JobEnded(JobId(job)), self.now_s)

    def say(self, replica, **rest):
        jobs = self.truth[replica].values()
        running = next(iter(self.truth[replica]), None)
        self.router.prefill_reported(report(replica, *jobs, running=running, **rest), self.now_s)

    @invariant()
    def counted_where_they_are_and_once(self):
        for name, jobs in self.truth.items():
            known = set(self.router.view.prefill[ReplicaId(name)].jobs)
            underway = {job for job, (replica, *_) in self.on_the_way.items() if replica == name}
            assert set(jobs) <= known | underway
            assert known <= set(jobs) | underway

    @invariant()
    def queues_agree_with_jobs(self):
        for replica in self.router.view.prefill.values():
            work = replica.outstanding(self.now_s)
            waiting = [job for job in replica.jobs.values() if job.job_id != replica.running]
            due = {job.job_id for job in waiting if job.deadline_s < math.inf}
            undue_s = sum(replica.work_s(job) for job in waiting if job.deadline_s == math.inf)
            assert {prefill.job_id for prefill in work.waiting} == due
            assert work.undue_s == pytest.approx(undue_s)
            assert replica.outstanding_tokens == sum(job.tokens for job in replica.jobs.values())
            last = LeastHarm().choose(NewPrefill(1, math.inf, 1.0), [replica], self.now_s)
            assert last.end_s >= self.now_s + replica.backlog_s(self.now_s)
            assert replica.backlog_s(self.now_s) >= 0


RouterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRouterMachine = RouterMachine.TestCase


def test_the_demand_on_decode_has_what_is_on_its_way_and_the_predicted_pace():
    tiers = {tier: replace(policy, tpot_s=0.05) for tier, policy in POLICIES.items()}
    router = RouterCore(tiers, LeastHarm(), RouterLimits(stale_after_s=100.0))
    router.prefill_reported(report("prefill"), 0.0)
    for name, pace_s in (("one", 0.04), ("two", 0.06)):
        router.view.decode_reported(DecodeReported(ReplicaId(name), 0.5, 10, 10_000, pace_s), 0.0)
    before = router.decode_demand(0.0)
    assert (before.memory, before.requests) == (pytest.approx(1.0), 20)
    assert before.pace == pytest.approx(2.0), "ten requests take 50 ms"
    router.place(request(1, 1000), 0.0)
    after = router.decode_demand(0.0)
    assert (after.memory, after.requests) == (pytest.approx(1.1), 21)
    awaited = tuple(AwaitedKv(JobId(f"waits {number}"), STANDARD) for number in range(90))
    waits = DecodeReported(ReplicaId("one"), 0.5, 100, 10_000, awaited=awaited)
    router.view.decode_reported(waits, 0.0)
    assert router.decode_demand(0.0).requests == 20, "prefill comes first for the others"
    assert router.decode_demand(1000.0).requests == 0, "nobody has reported for long"
