"""Which requests are let in although what has been learned says that they will be late."""

from dataclasses import replace

import pytest
from small_router import LINE, POLICIES, core, report, request, runs

from router.fleet.decode_replica import DecodeView, Newcomer
from router.fleet.prefill_replica import PrefillView
from router.fleet.view import FleetView, RouterLimits
from router.messages import JobEnded, Placed, PlacementReason
from router.placement.policies import Choice
from router.probes import PROBE_EVERY_S, Probes
from router.promises import Inquiry, Promises
from slo.admission.tenants import ANONYMOUS
from slo.errors import Rejected
from slo.predict.pass_time import LearnedPasses
from slo.predict.prefill_time import attention_pairs
from slo.reports import OutstandingJob
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

WORK = runs("work", 20_000, BACKGROUND)


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


def busy(*jobs, running=WORK, **rest):
    """What the only replica reports, which has work without a deadline that can be stopped."""
    return report("prefill-0", *jobs, WORK, running=running.job_id, preemptible_in_s=0.02, **rest)


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "not stopped"])
@pytest.mark.parametrize("slow", [1, 32])
def test_a_slow_way_does_not_have_requests_refused_for_good_where_no_replica_is_ever_idle(slow, is_stopped):
    """What takes long as its replica stops nothing for it is no way."""
    router = after_slow_first_tokens(slow)
    placed = []
    for number in range(100, 400):
        router.prefill_reported(busy(), float(number))
        asked = request(number, 100, ttft_s=0.5, explicit=True)
        if isinstance(router.place(asked, float(number)), Rejected):
            continue
        placed.append(number)
        asks = runs(number, 100, STANDARD)
        router.prefill_reported(busy(asks), number + 0.01)
        if is_stopped:
            router.prefill_reported(busy(asks, running=asks), number + 0.03)
            router.prefill_reported(busy(ended=(asked.job_id,)), number + 0.13)
        else:
            router.prefill_reported(busy(asks), number + 0.5)
            router.prefill_reported(report("prefill-0", ended=(WORK.job_id, asked.job_id)), number + 0.9)
        router.job_ended(JobEnded(asked.job_id, ttft_s=0.2 if is_stopped else 0.95), number + 0.95)
    if slow == 1:
        assert placed == [*range(100, 400)], "one slow first token is not believed"
    elif is_stopped:
        assert placed[:3] == [100, 105, 110]
        assert placed[-200:] == [*range(200, 400)], "learned from those that were let in"
    else:
        assert placed == [*range(100, 400, 5)], "nothing is learned, and one in five seconds let in"


@pytest.mark.parametrize("at_rest", [report("prefill-0"), busy()], ids=["idle", "busy"])
def test_a_replica_that_was_slow_for_a_while_does_not_have_requests_refused_for_good(at_rest):
    passes, router = LearnedPasses(LINE, (64, 512, 2048)), core(prefill=1, stale_after_s=1000.0)

    def runs_a_pass(factor=1.0):
        passes.add(300, attention_pairs(300), factor * LINE.prefill_s(300))

    for factor in [1.0] * 20 + [4.0] * 6:
        runs_a_pass(factor)
    assert passes.predictor.prefill_s(300) > 1.0, "by what was measured every request is late"
    placed = []
    for number in range(100):
        told = replace(at_rest, predictor=passes.predictor, unlearned=LINE)
        router.prefill_reported(told, float(number))
        hopeless = request(f"hopeless-{number}", 300, ttft_s=0.2, explicit=True, tenant="hasty")
        assert isinstance(router.place(hopeless, float(number)), Rejected), "late on a replica that is quick"
        asked = request(number, 300, ttft_s=1.0, explicit=True)
        if isinstance(router.place(asked, float(number)), Placed):
            placed.append(number)
            runs_a_pass()
            router.prefill_reported(replace(told, ended=(asked.job_id,)), number + 0.4)
            router.job_ended(JobEnded(asked.job_id, ttft_s=0.4), number + 0.4)
    assert placed == [*range(100)], "what is learned from the first one is enough for the others"


def test_nobody_is_let_in_who_would_not_go_first_where_a_replica_is_busy():
    router = after_slow_first_tokens(4)
    before = OutstandingJob(JobId("due"), STANDARD, 200, 0.35)
    instead = OutstandingJob(JobId("due"), PREMIUM, 320, 0.35)
    asked = request(1, 100, ttft_s=0.5, explicit=True)
    for what in (
        replace(busy(), preemptible_in_s=None),
        replace(busy(), preemptible_in_s=0.35),
        busy(before),
        busy(instead),
    ):
        router.prefill_reported(what, 100.0)
        assert isinstance(router.place(asked, 100.0), Rejected)
    router.prefill_reported(busy(), 100.0)
    placed = router.place(asked, 100.0)
    assert placed.predicted_ttft_s == pytest.approx(0.02 + 0.1 + 2.9), "as the way was"


def test_a_busy_replica_stops_its_work_for_one_request_at_a_time():
    router = after_slow_first_tokens(4)

    def places(now_s):
        tenants = [f"tenant-{number}-at-{now_s}" for number in range(4)]
        asked = [request(tenant, 100, ttft_s=0.5, explicit=True, tenant=tenant) for tenant in tenants]
        return [isinstance(router.place(each, now_s), Placed) for each in asked], asked[0].job_id

    router.prefill_reported(busy(), 100.0)
    placed, first = places(100.0)
    assert placed == [True, False, False, False]
    tried = OutstandingJob(first, STANDARD, 100, 0.4)
    router.prefill_reported(busy(tried, running=tried), 100.04)
    assert places(100.05)[0] == [False] * 4
    router.prefill_reported(busy(ended=(first,)), 100.15)
    assert places(100.16)[0] == [True, False, False, False]


def test_a_busy_replica_stops_its_work_for_another_once_a_client_has_left():
    """The first one's prefill is told of by no report any more."""
    router = after_slow_first_tokens(4)
    router.prefill_reported(busy(), 100.0)
    first, second, third = [request(name, 100, ttft_s=0.5, explicit=True, tenant=name) for name in "abc"]
    assert isinstance(router.place(first, 100.0), Placed)
    assert isinstance(router.place(second, 100.1), Rejected)
    router.job_ended(JobEnded(first.job_id), 100.2)
    assert isinstance(router.place(third, 100.3), Placed)


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
    dense = tuple((ANONYMOUS.name, 8000, 5600) for _ in range(60))
    router.prefill_reported(report("prefill-0", learned=dense), 0.0)
    placed = []
    for number in range(105):
        text = replace(request(number, None, ttft_s=3.0, explicit=True), prompt_bytes=8000)
        if isinstance(router.place(text, float(number)), Placed):
            placed.append(number)
            learned = ((ANONYMOUS.name, 8000, 2000),)
            ended = report("prefill-0", ended=(text.job_id,), learned=learned)
            router.prefill_reported(ended, number + 0.5)
            router.job_ended(JobEnded(text.job_id, ttft_s=2.1), number + 0.6)
    assert placed[:3] == [0, 5, 10], "too long by what is known of its tenant's texts"
    assert placed[-15:] == [*range(90, 105)], "learned from those that were let in"


def test_a_text_is_refused_that_would_be_late_as_any_text():
    router = core(prefill=1, stale_after_s=1000.0)
    dense = tuple((ANONYMOUS.name, 8000, 5600) for _ in range(60))
    router.prefill_reported(report("prefill-0", learned=dense), 0.0)
    for number in range(20):
        text = replace(request(number, None, ttft_s=1.5, explicit=True), prompt_bytes=8000)
        assert isinstance(router.place(text, 10.0 * number), Rejected)
        known = request(f"known-{number}", 3000, ttft_s=3.0, explicit=True)
        assert isinstance(router.place(known, 10.0 * number), Rejected), "its length is no estimate"


def test_tenants_that_may_have_another_let_in_are_not_remembered():
    replica = PrefillView(ReplicaId("prefill-0"), LINE, 0.0, {})
    decode = DecodeView(ReplicaId("decode-0"))
    probes = Probes(FleetView({}, RouterLimits(), 0.0), Promises(POLICIES, stretch=2.0))

    def is_let_in(tenant, now_s):
        asked = request(tenant, 100, explicit=True, tenant=tenant)
        newcomer = Newcomer(asked.job_id, STANDARD, 100)
        choice = Choice(replica, now_s, now_s + 0.1, PlacementReason.ONLY_REPLICA)
        inquiry = Inquiry(asked, newcomer, {}, [replica], decode, now_s)
        return probes.lets_in(inquiry, choice, 0.0, 0.0) is not None

    for number in range(1000):
        assert is_let_in(f"tenant-{number}", number / 8)
        assert not is_let_in(f"tenant-{max(0, number - 39)}", number / 8), "within five seconds"
        assert len(probes) <= 8 * PROBE_EVERY_S
    assert is_let_in("tenant-960", 1000 / 8)
    assert is_let_in("tenant-0", 1000 / 8)
    assert not is_let_in("tenant-960", 1000 / 8)
