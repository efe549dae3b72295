"""What counts against the limits of a tenant and its keys, and what does not."""

import random

import pytest
from gated_router import ask, report, router

from router.admission import Gate
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import JobEnded, Placed
from router.placement.registry import POLICIES
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import KeyLimit, TenantGates, TenantLimit
from slo.errors import RejectionReason
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS, STANDARD


def test_a_tenant_at_its_limit_is_refused_until_one_of_its_requests_has_ended():
    core, _ = router(a=TenantLimit(max_concurrent=1))
    assert isinstance(ask(core, "first"), Placed)
    refused = ask(core, "second")
    assert (refused.reason, refused.predicted_ttft_s) == (RejectionReason.CONCURRENCY, None)
    assert isinstance(ask(core, "other", tenant="b"), Placed)
    assert not any(job in replica.jobs for replica in core.view.prefill.values() for job in ["second"])
    core.job_ended(JobEnded(JobId("first")), 1.0)
    assert isinstance(ask(core, "third", now_s=1.0), Placed)


def test_a_request_that_is_refused_for_its_deadline_takes_no_place_of_its_tenant():
    core, admission = router(a=TenantLimit(max_concurrent=1))
    refused = ask(core, "late", STANDARD, tokens=10_000, ttft_s=0.1)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert admission.backlog_s(STANDARD) == 0.0
    assert isinstance(ask(core, "next"), Placed)


def test_every_answer_to_a_prompt_counts_against_its_tenant():
    core, _ = router()
    limit = TenantLimit(tokens_per_s=1.0, burst_tokens=1000)
    assert isinstance(ask(core, "ten", answers_per_prompt=10, limit=limit), Placed)
    assert ask(core, "one", limit=limit).reason is RejectionReason.TOKEN_RATE
    assert isinstance(ask(core, "other", tenant="b", limit=limit), Placed)


def test_every_prompt_of_a_request_counts_against_its_tenant():
    limits = RouterLimits(longest=8192)
    gate = Gate(AdmissionController(DEFAULT_TIERS, AdmissionRules(), TenantGates(), lambda: 1.0))
    core = RouterCore(DEFAULT_TIERS, POLICIES["least_harm"](random.Random(1).randrange), limits, gate=gate)
    report(core)
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    limit = TenantLimit(tokens_per_s=1000.0, burst_tokens=100_000)
    assert isinstance(ask(core, "batch", tokens=16 * 8000, prompts=16, limit=limit), Placed)
    refused = ask(core, "one", tokens=8000, limit=limit)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.TOKEN_RATE, pytest.approx(36.0))


def test_a_request_that_is_refused_for_its_deadline_takes_nothing_of_its_tenant():
    core, _ = router()
    limit = TenantLimit(tokens_per_s=1.0, burst_tokens=10_000)
    late = ask(core, "late", STANDARD, tokens=10_000, ttft_s=0.1, limit=limit)
    assert late.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert isinstance(ask(core, "next", tokens=10_000, limit=limit), Placed)


@pytest.mark.parametrize("of_key", [False, True])
def test_a_request_that_is_refused_for_its_deadline_says_nothing_of_how_long_one_takes(of_key):
    core, _ = router()
    limit = TenantLimit(max_concurrent=1)
    mine = {"key_limit": KeyLimit("ci", limit)} if of_key else {"limit": limit}
    for number in range(200):  # until their mean is 30 s
        now_s = 30.0 * number
        report(core, now_s=now_s)
        core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), now_s)
        assert isinstance(ask(core, f"{number}", now_s=now_s, **mine), Placed)
        if number < 199:
            core.job_ended(JobEnded(JobId(f"{number}")), now_s + 30.0)
    core.job_ended(JobEnded(JobId("199")), now_s := now_s + 5.0)
    for number in range(50):
        late = ask(core, f"late-{number}", STANDARD, tokens=10_000, ttft_s=0.1, now_s=now_s, **mine)
        assert late.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert isinstance(ask(core, "next", now_s=now_s, **mine), Placed)
    refused = ask(core, "one more", now_s=now_s, **mine)
    wait_s = pytest.approx(30.0, abs=2.0)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.CONCURRENCY, wait_s)


def test_a_request_that_is_refused_for_its_deadline_is_none_of_its_tenants_requests_per_second():
    core, _ = router()
    limit = TenantLimit(requests_per_s=1.0)
    late = ask(core, "late", STANDARD, tokens=10_000, ttft_s=0.1, limit=limit)
    assert late.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert isinstance(ask(core, "next", limit=limit), Placed)
    assert ask(core, "third", limit=limit).reason is RejectionReason.REQUEST_RATE
