"""Who may be placed again, and what travels with a request for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.replacement import ReplacementOutcome, ReplacementRules
from slo.request import JobId, ReplicaId, RequestContext
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

A, B = ReplicaId("a"), ReplicaId("b")


def context(tier, budget_s, explicit, e2e_s=None):
    return RequestContext(
        JobId("job"), "request", tier, budget_s, explicit_deadline=explicit, explicit_e2e_s=e2e_s
    )


class TestWhoMayBePlacedAgain:
    RULES = ReplacementRules(2, frozenset({STANDARD, BACKGROUND}))

    @given(
        st.sampled_from(DEFAULT_TIERS.names), st.none() | st.floats(-10, 10), st.booleans(), st.integers(0, 5)
    )
    def test_only_the_limit_and_an_impossible_deadline_stand_against_it(self, tier, budget_s, explicit, n):
        refusal = self.RULES.refusal(context(tier, budget_s, explicit), n)
        if n >= 2:
            assert refusal is ReplacementOutcome.LIMIT
        elif budget_s is None or budget_s > 0 or tier == PREMIUM or not explicit:
            assert refusal is None
        else:
            assert refusal is ReplacementOutcome.DEADLINE

    @given(st.sampled_from(DEFAULT_TIERS.names), st.floats(-10, 10), st.floats(-10, 10), st.integers(0, 1))
    def test_so_does_an_end_of_the_clients_own_that_has_passed(self, tier, budget_s, e2e_s, n):
        refusal = self.RULES.refusal(context(tier, budget_s, explicit=False, e2e_s=e2e_s), n)
        is_refused = e2e_s <= 0 and tier != PREMIUM
        assert refusal is (ReplacementOutcome.DEADLINE if is_refused else None)

    def test_with_a_limit_of_none_nothing_is_placed_again(self):
        never = ReplacementRules(0, frozenset())
        assert never.refusal(context(PREMIUM, None, explicit=False), 0) is ReplacementOutcome.LIMIT


@pytest.mark.parametrize("field", ["explicit_deadline", "failed_replicas", "explicit_e2e_s"])
def test_the_context_carries_what_replacement_needs(field):
    sent = RequestContext(
        JobId("job"),
        "request",
        PREMIUM,
        1.0,
        explicit_deadline=True,
        failed_replicas=(A, B),
        explicit_e2e_s=3.0,
    )
    assert getattr(RequestContext.decode(sent.encode()), field) == getattr(sent, field)
