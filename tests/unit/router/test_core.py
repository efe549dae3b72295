"""Where requests are placed, who is refused and why, and what is kept of those that are under way."""

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from small_router import LINE, POLICIES, admitted, core, report, request, runs

from router.admission import Gate
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import JobEnded, Placed, PlacementReason, PlacementRequested
from router.placement.least_harm import LeastHarm
from router.placement.policies import NewPrefill
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates, TenantLimit
from slo.admission.tenants import ANONYMOUS
from slo.errors import Rejected, RejectionReason
from slo.objectives import Objective
from slo.reports import AwaitedKv, DecodeReported, OutstandingJob, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, ObjectiveName, Tier


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


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ({"prompt_tokens": 500_000}, 4096),
        ({"prompt_tokens": None, "prompt_bytes": 2_000_000}, 4096),
        ({"prompt_tokens": 500_000, "prompts": 16}, 16 * 4096),
        ({"prompt_tokens": 16 * 4000, "prompts": 16}, 16 * 4000),
        ({"prompt_tokens": 1000, "answered_tokens": 500}, 1500),
        ({"prompt_tokens": 4000, "answered_tokens": 500}, 4096),
        ({"prompt_tokens": None, "prompt_bytes": 0, "answered_tokens": 500}, 501),
    ],
)
def test_a_prompt_is_no_more_work_than_the_model_takes(size, tokens):
    rules, limits = AdmissionRules(max_backlog_s=100.0), RouterLimits(stale_after_s=100.0, longest=4096)
    gate = Gate(AdmissionController(DEFAULT_TIERS, rules, TenantGates(), lambda: 1.0))
    router = RouterCore(POLICIES, LeastHarm(), limits, gate=gate)
    router.prefill_reported(report("prefill-0"), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 0.0)
    placed = router.place(replace(request(1, 1, BACKGROUND), **size), 0.0)
    assert placed.tokens == tokens
    assert isinstance(router.place(request(2, 100, BACKGROUND), 0.0), Placed)


def test_one_that_is_placed_again_in_vain_is_still_its_tenants():
    gates = TenantGates()
    gates.of("a", TenantLimit(max_concurrent=1))
    admission = AdmissionController(DEFAULT_TIERS, AdmissionRules(), gates, lambda: 1.0)
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=100.0), gate=Gate(admission))
    router.prefill_reported(report("prefill-0"), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 0.0)
    assert isinstance(router.place(request(1, 1000, tenant="a"), 0.0), Placed)
    late = request(1, 1000, tenant="a", ttft_s=0.01, explicit=True, is_admitted=True)
    assert router.place(late, 0.0).reason is RejectionReason.DEADLINE_INFEASIBLE
    assert router.place(request(2, 10, tenant="a"), 0.0).reason is RejectionReason.CONCURRENCY
    router.job_ended(JobEnded(JobId("job-1"), None), 0.0)
    assert isinstance(router.place(request(3, 10, tenant="a"), 0.0), Placed)


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
        None,
        pytest.approx(0.2),
        0.15,
        unattainable=(ObjectiveName.TTFT,),
    )
    router.place(request(2, 1000, ttft_s=10.0), 0.0)
    behind = router.place(request(3, 100, ttft_s=0.15, explicit=True), 0.0)
    assert (behind.retry_after_s, behind.predicted_ttft_s) == (None, pytest.approx(1.2))


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


def test_without_replicas_there_is_no_place():
    for router, lacked_decode in ((core(prefill=0), False), (core(decode=0), True)):
        refused = router.place(request(1, 10), 0.0)
        assert (refused.reason, refused.lacked_decode) == (RejectionReason.NO_REPLICA, lacked_decode)
    silent = core(stale_after_s=10.0)
    assert silent.place(request(1, 10), 9.0).prefill_replica == "prefill-0"
    assert silent.place(request(1, 10), 60.0).reason is RejectionReason.NO_REPLICA


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


def test_the_demand_on_decode_goes_by_the_pace_of_late():
    tiers = {tier: replace(policy, tpot_s=0.05) for tier, policy in POLICIES.items()}
    router = RouterCore(tiers, LeastHarm(), RouterLimits(stale_after_s=100.0))

    def demand(now_s, slow, slow_s):
        for name, running, pace_s in (("quick", 10, 0.04), ("slow", slow, slow_s)):
            told = DecodeReported(ReplicaId(name), 0.5, running, 10_000, pace_s)
            router.view.decode_reported(told, now_s)
        return router.decode_demand(now_s).pace

    assert demand(0.0, 10, 0.08) > 2.0
    assert demand(20.0, 0, None) > 0.8
    assert demand(40.0, 0, None) == pytest.approx(10 / 15), "fifteen take 50 ms where it is quick"


def test_what_waits_for_decodes_memory_is_asked_for_of_it():
    """A replica of two thirds in use is full for a second request like the first."""
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=100.0))
    router.prefill_reported(report("prefill"), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0, 10_000), 0.0)
    for number in range(3):
        router.place(request(number, 6700), 0.0)

    def memory(prefilled, awaited, waiting):
        left = [runs(number, 6700) for number in range(prefilled, 3)]
        ended = tuple(JobId(f"job-{number}") for number in range(prefilled))
        router.prefill_reported(report("prefill", *left, ended=ended), 1.0)
        kv = tuple(AwaitedKv(JobId(f"job-{number}"), STANDARD, 6700) for number in awaited)
        told = DecodeReported(ReplicaId("decode"), 0.67, 3, 10_000, awaited=kv, waiting=waiting)
        router.view.decode_reported(told, 1.0)
        return pytest.approx(router.decode_demand(1.0).memory)

    assert memory(1, (0, 1, 2), 0) == 0.67, "what is to be prefilled comes no faster than that is done"
    assert memory(2, (0, 1, 2), 1) == 1.34, "one of the two that are prefilled is pulled, and has memory"
    assert memory(2, (0, 1, 2), 0) == 0.67
    assert memory(3, (1, 2), 2) == 1.67, "no more than the replica has: streams that end make room"


class LookedUp(str):
    """A job's name that counts how often it is looked up."""

    __slots__ = ()
    looks = 0

    def __hash__(self):
        LookedUp.looks += 1
        return super().__hash__()


def test_the_demand_on_decode_takes_no_look_at_every_replica_for_every_request():
    awaited = tuple(AwaitedKv(LookedUp(f"waits {number}"), STANDARD, 10) for number in range(20))

    def looks(replicas):
        router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=100.0))
        for number in range(replicas):
            router.prefill_reported(report(f"prefill-{number}"), 0.0)
        told = DecodeReported(ReplicaId("decode"), 0.5, 20, 10_000, awaited=awaited, waiting=20)
        router.view.decode_reported(told, 0.0)
        LookedUp.looks = 0
        assert router.decode_demand(0.0).memory == pytest.approx(0.52)
        return LookedUp.looks

    assert looks(10) == looks(1) > 0
