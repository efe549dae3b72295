"""How long the queue of a class may be, who lengthens it, and what is asked of the fleet for it."""

import random

import pytest
from admission_offers import WORK_S, controller, request
from own_tiers import TEXT

from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates
from slo.errors import Rejected, RejectionReason
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM, TierPolicy, TierSet

SHARE = DEFAULT_TIERS[BACKGROUND].share


def test_a_queue_that_would_take_too_long_is_not_lengthened():
    admission = controller(AdmissionRules(max_backlog_s=10.0, max_refusal=0.5))
    decisions = [admission.decide(request(n, work_s=1.0), n * 0.01) for n in range(200)]
    backlog = [d for d in decisions if getattr(d, "reason", None) is RejectionReason.BACKLOG]
    assert backlog
    assert all(1.0 <= d.retry_after_s <= 60.0 for d in backlog)
    assert admission.backlog_s(BACKGROUND) <= 12.0
    for n in range(200):
        admission.served(JobId(f"background-a-{n}"))
    assert admission.backlog_s(BACKGROUND) == 0.0
    assert admission.decide(request(999), 60.0) is None


def test_a_client_that_waits_for_each_answer_is_not_refused():
    admission, now_s = controller(AdmissionRules()), 0.0
    for number in range(500):
        asked = request(number)
        assert admission.decide(asked, now_s) is None
        now_s += WORK_S
        admission.ended(asked.job_id, now_s)
    assert admission.load(now_s) > 0.8


@pytest.mark.parametrize("tier", [PREMIUM, STANDARD, BACKGROUND])
def test_no_class_has_a_queue_without_end(tier):
    """Twenty thousand requests at once; the fleet does two seconds of work in a second."""
    admission = controller(AdmissionRules(max_backlog_s=120.0, max_late_backlog_s=30.0), replicas=2.0)
    decisions = [admission.decide(request(number, tier, work_s=1.0), 0.0) for number in range(20_000)]
    assert admission.backlog_s(tier) <= 2 * (30.0 if tier == PREMIUM else 120.0) + 1.0
    refused = decisions[-1]
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectionReason.BACKLOG or tier != PREMIUM
    assert refused.retry_after_s >= 1.0


@pytest.mark.parametrize(
    ("policy", "longest_s"),
    [
        (TierPolicy(0.5, None, sheddable=False, weight=1), 30.0),
        (TierPolicy(None, None, sheddable=False, weight=1, ttft_scale=3.0), 30.0),
        (TierPolicy(50.0, None, sheddable=False, weight=1), 50.0),
        (TierPolicy(500.0, None, sheddable=False, weight=1), 120.0),
        (TierPolicy(None, None, sheddable=False, weight=1, e2e_s=5.0), 30.0),
        (TierPolicy(50.0, None, sheddable=False, weight=1, e2e_s=40.0), 40.0),
        (TierPolicy(None, None, sheddable=False, weight=1), 120.0),
        (TierPolicy(0.5, None, sheddable=True, weight=1), 120.0),
    ],
)
def test_how_long_a_queue_may_be(policy, longest_s):
    rules = AdmissionRules(max_backlog_s=120.0, max_late_backlog_s=30.0, calm_s=1e9)
    tiers = TierSet({TEXT: policy}, default=TEXT)
    admission = AdmissionController(tiers, rules, TenantGates(), random.Random(1).random)
    admission.capacity_changed(1.0, 0.0)
    for number in range(300):
        admission.decide(request(number, TEXT, work_s=1.0), 0.0)
    assert admission.backlog_s(TEXT) == longest_s + 1.0


@pytest.mark.parametrize("objective", [{"ttft_s": 5.0}, {"ttft_s": None, "e2e_s": 5.0}])
def test_what_has_a_deadline_orders_replicas_and_leaves_nobody_behind_in_an_overload(objective):
    """An end-to-end objective is a deadline of the first token, too."""
    tiers = TierSet({TEXT: TierPolicy(tpot_s=None, sheddable=False, weight=1, **objective)}, default=TEXT)
    admission = AdmissionController(tiers, AdmissionRules(), TenantGates(), lambda: 0.99)
    admission.capacity_changed(1.0, 0.0)
    for number in range(200):
        admission.decide(request(number, TEXT, work_s=1.0), 0.5 * number)
    assert admission.demand(100.0)[1] == admission.backlog_s(TEXT) > 0
    assert isinstance(admission.decide(request("late", TEXT), 100.0), Rejected), "the oldest waits for long"
    assert admission.backlog_s(TEXT) < 30.0


def test_the_servers_own_requests_are_never_refused():
    admission = controller(AdmissionRules(max_backlog_s=1.0))
    assert [admission.decide(request(number, SYSTEM, work_s=1.0), 0.0) for number in range(100)] == [
        None
    ] * 100


def test_the_demand_counts_what_is_refused_and_of_what_waits_only_what_has_an_objective():
    admission = controller(replicas=2.0)
    admission.follow({BACKGROUND: 1.0}, 0.1)
    for number in range(2000):
        admission.decide(request(number, BACKGROUND), number / 20)
        if number % 2 == 0:
            asked = request(number, STANDARD)
            admission.decide(asked, number / 20)
            admission.ended(asked.job_id, number / 20)
    admission.decide(request("waits", PREMIUM, work_s=3.0), 100.0)
    work, backlog_s = admission.demand(100.0)
    let_in = work - admission.refused_work(100.0)
    assert let_in == pytest.approx(2 * SHARE + 10 * WORK_S + 3 / 20, rel=0.15)
    assert work == pytest.approx(20 * WORK_S + 10 * WORK_S + 3 / 20, rel=0.1)
    assert backlog_s == pytest.approx(3.0)


def test_what_is_refused_after_all_is_refused_and_what_decode_computes_was_never_asked_for():
    admission = controller()
    for number in range(40):
        admission.decide(request(number, STANDARD), 0.1 * number)
    assert admission.refused_work(4.0) == 0.0
    for number in range(20):
        admission.withdrawn(request(number, STANDARD).job_id, 4.0)
        admission.not_for_prefill(request(number + 20, STANDARD).job_id)
        admission.withdrawn(request(number + 20, STANDARD).job_id, 4.0)
    work, _ = admission.demand(4.2)
    assert admission.refused_work(4.2) == pytest.approx(work, rel=0.02)
    assert work == pytest.approx(20 * WORK_S / 20, rel=0.2)
    assert admission.refused_work(2000.0) == pytest.approx(0.0, abs=1e-9)
    admission.decide(request("later", STANDARD), 2000.0)
    assert admission.refused_work(2000.0) == pytest.approx(0.0, abs=1e-9), "and is forgotten"


def test_what_was_admitted_before_a_restart_is_not_taken_from_what_is_asked_for_now():
    admission = controller()
    for number in range(10):
        admission.decide(request(number, STANDARD), 0.1 * number)
    load = admission.load(2.0)
    for number in range(30):
        admission.waits(JobId(f"old-{number}"), STANDARD, WORK_S, 2.0)
        admission.not_for_prefill(JobId(f"old-{number}"))
    assert admission.load(2.2) == pytest.approx(load, rel=0.05)
    assert admission.backlog_s(STANDARD) == pytest.approx(10 * WORK_S)
