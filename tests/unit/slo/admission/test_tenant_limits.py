"""Rate and concurrency of one tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.admission.tenant_limits import (
    NO_LIMIT,
    NO_USAGE,
    KeyLimit,
    TenantGate,
    TenantGates,
    TenantLimit,
    TokenBucket,
    Usage,
)
from slo.errors import RejectionReason


def test_a_bucket_passes_its_size_at_once_and_then_its_rate():
    bucket = TokenBucket(2.0, 3.0)
    for _ in range(3):
        assert bucket.wait_s(1, 10.0) == 0
        bucket.take(1, 10.0)
    assert bucket.wait_s(1, 10.0) == pytest.approx(0.5)
    assert bucket.wait_s(1, 10.4) == pytest.approx(0.1)
    assert bucket.wait_s(1, 10.5) == 0


def test_what_is_larger_than_the_bucket_passes_when_it_is_full_and_leaves_a_debt():
    bucket = TokenBucket(10.0, 100.0)
    assert bucket.wait_s(250, 0.0) == 0
    bucket.take(250, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(15.1)
    assert bucket.wait_s(250, 0.0) == pytest.approx(25.0)


@given(
    rate=st.floats(0.5, 20),
    size=st.floats(1, 20),
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=80),
)
def test_in_no_span_does_more_pass_than_size_and_rate_allow(rate, size, gaps):
    bucket, now_s, passed = TokenBucket(rate, size), 0.0, []
    for gap_s in gaps:
        now_s += gap_s
        if bucket.wait_s(1, now_s) == 0:
            bucket.take(1, now_s)
            passed.append(now_s)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= size + rate * (passed[last] - passed[first]) + 1e-6


@given(st.floats(0.1, 50), st.floats(1, 50), st.floats(0.5, 200))
def test_whoever_waits_as_long_as_told_passes(rate, size, amount):
    bucket = TokenBucket(rate, size)
    bucket.take(size, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    assert bucket.wait_s(amount, wait_s * (1 + 1e-9) + 1e-9) == pytest.approx(0.0, abs=1e-6)


def test_each_limit_has_its_reason():
    requests = TenantGate(TenantLimit(requests_per_s=0.5))
    requests.began(Usage(10), 0.0)
    assert requests.refusal(Usage(10), 0.0) == (RejectionReason.REQUEST_RATE, pytest.approx(2.0))
    tokens = TenantGate(TenantLimit(tokens_per_s=10, burst_tokens=100))
    tokens.began(Usage(100), 0.0)
    assert tokens.refusal(Usage(50), 0.0) == (RejectionReason.TOKEN_RATE, pytest.approx(5.0))
    two = TenantGate(TenantLimit(max_concurrent=2))
    two.began(Usage(10), 0.0)
    assert two.refusal(Usage(10), 0.0) is None
    two.began(Usage(10), 0.0)
    reason, _ = two.refusal(Usage(10), 0.0)
    assert reason is RejectionReason.CONCURRENCY
    two.ended(1.0, Usage(10), None, 1.0)
    assert two.refusal(Usage(10), 0.0) is None


def test_a_refused_request_takes_nothing():
    gate = TenantGate(TenantLimit(requests_per_s=1.0, tokens_per_s=1.0, burst_tokens=10))
    gate.began(Usage(10), 0.0)
    for _ in range(5):
        assert gate.refusal(Usage(1), 0.5) is not None
    assert gate.refusal(Usage(1), 1.0) is None


def test_tenants_have_gates_of_their_own():
    gates = TenantGates()
    gates.of("small", TenantLimit(max_concurrent=1, weight=2.0)).began(Usage(1), 0.0)
    assert gates.of("small").refusal(Usage(1), 0.0) is not None
    assert gates.of("other").refusal(Usage(1), 0.0) is None
    assert (gates.weight("small"), gates.weight("other")) == (2.0, 1.0)


@pytest.mark.parametrize("values", [{"requests_per_s": 0}, {"max_concurrent": 0}, {"weight": -1.0}])
def test_a_limit_that_lets_nobody_through_is_refused(values):
    with pytest.raises(ValueError, match="must be above 0"):
        TenantLimit(**values)


def test_output_tokens_are_reserved_and_what_was_not_generated_is_given_back():
    gate = TenantGate(TenantLimit(output_tokens_per_s=10, burst_output_tokens=1000))
    asked = Usage(50, 800)
    gate.began(asked, 0.0)
    reason, wait_s = gate.refusal(asked, 0.0)
    assert (reason, wait_s) == (RejectionReason.OUTPUT_TOKEN_RATE, pytest.approx(60.0))
    gate.ended(1.0, asked, Usage(50, 100), 0.0)
    assert gate.refusal(asked, 0.0) is None


def test_a_request_that_is_withdrawn_leaves_no_trace():
    limit = TenantLimit(
        requests_per_s=1.0, tokens_per_s=1.0, burst_tokens=10, output_tokens_per_s=1.0, max_concurrent=1
    )
    gate, asked = TenantGate(limit), Usage(10, 10)
    for _ in range(50):
        assert gate.refusal(asked, 0.0) is None
        gate.began(asked, 0.0)
        gate.withdrawn(asked, 0.0)
    gate.began(asked, 0.0)
    assert gate.refusal(asked, 0.0) == (RejectionReason.CONCURRENCY, 1.0), "as before any had ended"


def test_prompt_tokens_are_charged_as_they_were_in_the_end():
    gate = TenantGate(TenantLimit(tokens_per_s=10, burst_tokens=100))
    gate.began(Usage(20), 0.0)
    gate.ended(1.0, Usage(20), Usage(90), 0.0)
    assert gate.refusal(Usage(11), 0.0) == (RejectionReason.TOKEN_RATE, pytest.approx(0.1))


def test_what_nobody_knows_is_not_given_back_and_what_did_not_run_is():
    for used, is_refused in ((None, True), (NO_USAGE, False)):
        gate = TenantGate(TenantLimit(tokens_per_s=1, burst_tokens=10, output_tokens_per_s=1))
        gate.began(Usage(10, 10), 0.0)
        gate.ended(0.0, Usage(10, 10), used, 0.0)
        assert (gate.refusal(Usage(10, 10), 0.0) is not None) is is_refused


def test_a_limit_that_changes_holds_from_the_next_request_on():
    gates = TenantGates()
    gates.of("a", TenantLimit(max_concurrent=1)).began(Usage(1), 0.0)
    assert gates.of("a", TenantLimit(max_concurrent=1)).refusal(Usage(1), 0.0) is not None
    assert gates.of("a", TenantLimit(max_concurrent=2)).refusal(Usage(1), 0.0) is None
    assert gates.of("a", TenantLimit(max_concurrent=1)).refusal(Usage(1), 0.0) is not None, "it still runs"


@pytest.mark.parametrize(
    "limits",
    [
        (TenantLimit(requests_per_s=1), TenantLimit(requests_per_s=1, weight=2)),
        (TenantLimit(requests_per_s=1), TenantLimit(requests_per_s=2)),
        (TenantLimit(tokens_per_s=1, burst_tokens=10), TenantLimit(tokens_per_s=1, burst_tokens=20)),
        (TenantLimit(output_tokens_per_s=1), TenantLimit(output_tokens_per_s=1, max_concurrent=1000)),
    ],
)
@pytest.mark.parametrize("of_key", [False, True])
def test_ingresses_with_key_files_of_different_age_do_not_let_more_pass_than_either_alone(limits, of_key):
    gates, asked, passed = TenantGates(), Usage(10, 10), 0
    for number in range(100):
        limit = limits[number % 2]
        gate = gates.of_key("a", KeyLimit("k", limit)) if of_key else gates.of("a", limit)
        if gate.refusal(asked, 0.0) is None:
            gate.began(asked, 0.0)
            passed += 1
    assert 1 <= passed <= 2


def test_a_limit_that_is_raised_holds_at_once_and_what_was_taken_stays_taken():
    gates = TenantGates()
    gates.of("a", TenantLimit(tokens_per_s=1, burst_tokens=10)).began(Usage(10), 0.0)
    gate = gates.of("a", TenantLimit(tokens_per_s=10, burst_tokens=100))
    assert gate.refusal(Usage(90), 0.0) is None
    assert gate.refusal(Usage(100), 0.0) == (RejectionReason.TOKEN_RATE, pytest.approx(1.0))
    gate.began(Usage(90), 0.0)
    gate.ended(1.0, Usage(90), Usage(30), 1.0)
    gate = gates.of("a", TenantLimit(tokens_per_s=10, burst_tokens=40))
    assert gate.refusal(Usage(10), 1.0) is None
    assert gate.refusal(Usage(40), 1.0) is not None


@pytest.mark.parametrize("of_key", [False, True])
def test_ingresses_that_differ_on_whether_there_is_a_limit_do_not_fill_its_bucket(of_key):
    gates, asked, passed = TenantGates(), Usage(10, 1000), 0
    limited, without = TenantLimit(output_tokens_per_s=100.0), TenantLimit()
    for number in range(100):
        limit = limited if number % 2 else without
        gate = gates.of_key("a", KeyLimit("k", limit)) if of_key else gates.of("a", limit)
        if gate.refusal(asked, 0.0) is None:
            gate.began(asked, 0.0)
            passed += limit is limited
    assert passed == 1
    gate = gates.of_key("a", KeyLimit("k", limited)) if of_key else gates.of("a", limited)
    assert gate.refusal(asked, 5.0) == (RejectionReason.OUTPUT_TOKEN_RATE, pytest.approx(5.0))
    assert gate.refusal(asked, 10.0) is None, "what passed without a limit is no debt"


def test_what_ends_while_its_limit_is_absent_is_given_back():
    limit, asked = TenantLimit(output_tokens_per_s=100.0), Usage(10, 1000)
    gate = TenantGate(limit)
    for _ in range(5):
        gate.holds(limit)
        gate.began(asked, 0.0)
        gate.holds(NO_LIMIT)
        gate.ended(1.0, asked, Usage(10, 10), 0.0)
    gate.holds(limit)
    assert gate.refusal(asked, 0.0) == (RejectionReason.OUTPUT_TOKEN_RATE, pytest.approx(0.5))


def test_what_is_withdrawn_while_its_limit_is_absent_leaves_no_trace():
    limit, asked = TenantLimit(requests_per_s=1, tokens_per_s=1, output_tokens_per_s=100.0), Usage(10, 1000)
    gate = TenantGate(limit)
    gate.began(asked, 0.0)
    gate.holds(NO_LIMIT)
    gate.withdrawn(asked, 0.0)
    gate.holds(limit)
    assert gate.refusal(asked, 0.0) is None


def test_what_began_without_a_limit_gives_back_no_more_than_its_bucket_holds():
    limit, asked = TenantLimit(output_tokens_per_s=100.0), Usage(10, 1000)
    gate = TenantGate(limit)
    gate.holds(NO_LIMIT)
    for _ in range(5):
        gate.began(asked, 0.0)
        gate.ended(1.0, asked, Usage(10, 10), 0.0)
    gate.holds(limit)
    gate.began(asked, 0.0)
    assert gate.refusal(asked, 0.0) == (RejectionReason.OUTPUT_TOKEN_RATE, pytest.approx(10.0))
