"""Output is reserved of its tenant's tokens until somebody says how much there was."""

import pytest
from gated_router import ask, router

from router.messages import JobEnded, LiveJobs, Placed
from slo.admission.tenant_limits import KeyLimit, TenantLimit, Usage
from slo.errors import RejectionReason
from slo.request import JobId


def test_output_is_reserved_until_the_end_says_how_much_there_was():
    core, _ = router()
    limit = TenantLimit(output_tokens_per_s=1.0, burst_output_tokens=1000)
    assert isinstance(ask(core, "first", output_tokens=900, limit=limit), Placed)
    assert ask(core, "second", output_tokens=900, limit=limit).reason is RejectionReason.OUTPUT_TOKEN_RATE
    core.job_ended(JobEnded(JobId("first"), used=Usage(100, 10)), 0.0)
    assert isinstance(ask(core, "third", output_tokens=900, limit=limit), Placed)


@pytest.mark.parametrize("is_heard_first", [False, True])
@pytest.mark.parametrize("of_key", [False, True])
def test_of_an_answer_whose_client_has_left_who_generated_it_says_how_much_there_was(is_heard_first, of_key):
    """As of one that does not stream: the ingress has seen nothing of it."""
    core, _ = router()
    limit = TenantLimit(output_tokens_per_s=1.0, burst_output_tokens=1000)
    mine = {"key_limit": KeyLimit("ci", limit)} if of_key else {"limit": limit}
    assert isinstance(ask(core, "first", output_tokens=900, **mine), Placed)
    if is_heard_first:
        core.generated(JobId("first"), 10, 0.0)
        core.job_ended(JobEnded(JobId("first")), 0.0)
    else:
        core.job_ended(JobEnded(JobId("first")), 0.0)
        assert ask(core, "second", output_tokens=900, **mine).reason is RejectionReason.OUTPUT_TOKEN_RATE
        core.generated(JobId("first"), 10, 0.0)
    assert isinstance(ask(core, "third", output_tokens=900, **mine), Placed)
    refused = ask(core, "fourth", output_tokens=100, **mine)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.OUTPUT_TOKEN_RATE, 10.0)


@pytest.mark.parametrize("is_generated_told", [False, True])
def test_an_end_that_is_heard_of_late_still_says_how_much_there_was(is_generated_told):
    """The router was away, and its ingress has said meanwhile that the request does not live."""
    core, _ = router()
    limit = TenantLimit(tokens_per_s=1.0, burst_tokens=500, output_tokens_per_s=1.0, burst_output_tokens=1000)
    first = ask(core, "first", output_tokens=900, limit=limit, asker="ingress", number=1)
    assert isinstance(first, Placed)
    core.reconcile(LiveJobs("ingress", 1, ()), 0.0)
    assert ask(core, "second", output_tokens=900, limit=limit).reason is RejectionReason.OUTPUT_TOKEN_RATE
    for _ in range(2):  # it is told again what it may have heard
        core.job_ended(JobEnded(JobId("first"), used=Usage(400, 10)), 0.0)
        if is_generated_told:
            core.generated(JobId("first"), 8, 0.0)
    refused = ask(core, "second", output_tokens=1000, limit=limit)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.OUTPUT_TOKEN_RATE, 10.0)
    refused = ask(core, "second", prompt_tokens=150, limit=limit)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.TOKEN_RATE, 50.0)


def test_of_one_that_went_on_elsewhere_the_larger_word_counts():
    """A replica that hung says what it had when it is left, and the next one what there was in the end."""
    core, _ = router()
    limit = TenantLimit(output_tokens_per_s=10.0, burst_output_tokens=1000)
    assert isinstance(ask(core, "first", output_tokens=900, limit=limit), Placed)
    core.generated(JobId("first"), 10, 0.0)
    core.job_ended(JobEnded(JobId("first")), 0.0)
    core.generated(JobId("first"), 300, 0.0)
    core.generated(JobId("first"), 20, 0.0)
    refused = ask(core, "second", output_tokens=1000, limit=limit)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.OUTPUT_TOKEN_RATE, 30.0)


def test_a_word_on_what_was_generated_changes_nothing_that_is_known():
    core, _ = router()
    limit = TenantLimit(output_tokens_per_s=10.0, burst_output_tokens=1000)
    assert isinstance(ask(core, "first", output_tokens=900, limit=limit), Placed)
    core.job_ended(JobEnded(JobId("first"), used=Usage(100, 400)), 0.0)
    core.generated(JobId("first"), 10, 0.0)
    core.generated(JobId("of another router"), 10, 0.0)
    refused = ask(core, "second", output_tokens=1000, limit=limit)
    assert refused.retry_after_s == 40.0
