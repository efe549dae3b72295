"""A tenth of those that wait may be given up on suspicion in ten seconds, and ten in any case."""

import pytest

from slo.replacement_budget import MIN_BUDGET, WINDOW_S, ReplacementBudget


def given_up(waits, asked, at_s=0.0):
    budget = ReplacementBudget()
    for _ in range(waits):
        budget.waits(at_s)
    return sum(budget.take(at_s) for _ in range(asked))


@pytest.mark.parametrize(("waits", "expected"), [(0, MIN_BUDGET), (50, MIN_BUDGET), (100, 10), (1000, 100)])
def test_a_tenth_may_be_given_up_and_ten_in_any_case(waits, expected):
    assert given_up(waits, 1000) == expected


def test_the_budget_comes_back():
    budget = ReplacementBudget()
    assert sum(budget.take(0.0) for _ in range(99)) == MIN_BUDGET
    assert not budget.take(WINDOW_S)
    assert budget.take(WINDOW_S + 0.1)
