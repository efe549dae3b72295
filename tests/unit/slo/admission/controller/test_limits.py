"""Limits of a tenant and of its keys, and which refusals are its own fault."""

from dataclasses import replace

import pytest
from admission_offers import WORK_S, controller, request

from slo.admission.tenant_limits import KeyLimit, TenantLimit, Usage
from slo.errors import Rejected, RejectionReason
from slo.outcomes import Outcome, outcome_of
from slo.tiers import BACKGROUND, DEFAULT_TIERS, SYSTEM


def test_tenant_limits_refuse_before_anything_is_counted():
    admission = controller(a=TenantLimit(requests_per_s=1.0, burst_requests=1))
    assert admission.decide(request(0), 0.0) is None
    for n in range(1, 500):
        refused = admission.decide(request(n), 0.0)
        assert refused == Rejected(RejectionReason.REQUEST_RATE, 1.0)
    assert admission.load(1.0) < 0.02
    assert admission.decide(request(500), 1.0) is None


def test_concurrency_is_freed_by_the_end_of_a_request_not_of_its_prefill():
    admission = controller(a=TenantLimit(max_concurrent=1))
    first, second = request(0), request(1)
    assert admission.decide(first, 0.0) is None
    admission.served(first.job_id)
    assert admission.decide(second, 1.0).reason is RejectionReason.CONCURRENCY
    admission.ended(first.job_id, 2.0)
    admission.ended(first.job_id, 2.0)
    assert admission.decide(second, 3.0) is None
    assert admission.decide(request(2), 3.0).reason is RejectionReason.CONCURRENCY


def test_a_request_whose_end_nobody_reports_is_forgotten():
    admission = controller(a=TenantLimit(max_concurrent=1), b=TenantLimit())
    assert admission.decide(request(0), 0.0) is None
    assert admission.decide(request(1, tenant="b"), 3700.0) is None
    assert admission.decide(request(1), 3701.0) is None


def test_a_request_that_is_placed_again_is_not_counted_again():
    admission = controller(a=TenantLimit(max_concurrent=1, requests_per_s=0.001))
    for now_s in (0.0, 1.0, 2.0):
        assert admission.decide(request(0), now_s) is None
    assert admission.backlog_s(BACKGROUND) == pytest.approx(WORK_S)


def test_the_servers_own_requests_know_no_limits():
    admission = controller(a=TenantLimit(max_concurrent=1))
    admission.follow(dict.fromkeys((*DEFAULT_TIERS.names, SYSTEM), 1.0), 1.0)
    for n in range(50):
        assert admission.decide(request(n, SYSTEM), 0.0) is None
    assert admission.load(0.0) == 0.0


@pytest.mark.parametrize("reason", RejectionReason)
def test_limits_reject_and_the_state_of_the_fleet_sheds(reason):
    own = {
        RejectionReason.REQUEST_RATE,
        RejectionReason.TOKEN_RATE,
        RejectionReason.OUTPUT_TOKEN_RATE,
        RejectionReason.CONCURRENCY,
    }
    assert outcome_of(reason) is (Outcome.REJECTED if reason in own else Outcome.SHED)


def test_a_key_is_held_to_its_own_limits_and_its_tenants():
    admission = controller(a=TenantLimit(max_concurrent=3))
    ci = KeyLimit("ci", TenantLimit(max_concurrent=2, tokens_per_s=1, burst_tokens=250))
    jobs = [replace(request(number), key_limit=ci) for number in range(6)]
    assert [admission.decide(job, 0.0) for job in jobs[:2]] == [None, None]
    refused = admission.decide(jobs[2], 0.0)
    assert (refused.reason, refused.key_name) == (RejectionReason.CONCURRENCY, "ci")
    assert admission.decide(request(9), 0.0) is None, "others of its tenant are not held to it"
    refused = admission.decide(jobs[2], 0.0)
    assert (refused.reason, refused.key_name) == (RejectionReason.CONCURRENCY, None), "its tenant's"
    admission.ended(request(9).job_id, 1.0)
    admission.ended(jobs[0].job_id, 1.0, Usage(100))
    refused = admission.decide(jobs[3], 1.0)
    assert (refused.reason, refused.key_name) == (RejectionReason.TOKEN_RATE, "ci"), "51 of 250 are left"
    admission.ended(jobs[1].job_id, 1.0, Usage(0))
    assert admission.decide(jobs[3], 1.0) is None, "what the second did not take is given back"
    other = replace(request(0, tenant="b"), key_limit=ci)
    assert admission.decide(other, 1.0) is None, "a key of another tenant with the same name is another"


def test_a_refusal_by_a_key_takes_nothing_of_its_tenant():
    admission = controller(a=TenantLimit(requests_per_s=0.001, burst_requests=2))
    ci = KeyLimit("ci", TenantLimit(requests_per_s=0.001, burst_requests=1))
    assert admission.decide(replace(request(0), key_limit=ci), 0.0) is None
    for number in range(1, 9):
        assert admission.decide(replace(request(number), key_limit=ci), 0.0).key_name == "ci"
    assert admission.decide(request(9), 0.0) is None


def test_limits_of_a_key_that_change_hold_from_then_on():
    admission = controller()
    one, two = (KeyLimit("ci", TenantLimit(max_concurrent=most)) for most in (1, 2))
    jobs = [replace(request(number), key_limit=one) for number in range(9)]
    assert admission.decide(jobs[0], 0.0) is None
    assert admission.decide(jobs[1], 0.0) is not None
    assert admission.decide(replace(jobs[1], key_limit=two), 0.0) is None
    admission.ended(jobs[0].job_id, 1.0)
    assert admission.decide(replace(jobs[2], key_limit=two), 1.0) is None, "the old one does not come back"
    assert admission.decide(replace(jobs[3], key_limit=two), 1.0) is not None
