"""Whether a class has had less than its share of prefill, over minutes."""

import pytest

from slo.admission.share_credit import OVER_S, ShareCredit
from slo.tiers import BACKGROUND


@pytest.fixture
def credit():
    """Of a class with a tenth of ten seconds of work a second, which has had nothing yet."""
    credit = ShareCredit({BACKGROUND: 0.1})
    assert credit.covers(BACKGROUND, 1.0, 10.0, 0.0)
    return credit


def test_what_was_had_above_the_share_is_paid_back_by_its_time(credit):
    credit.admitted(BACKGROUND, 60.0)
    assert not credit.covers(BACKGROUND, 1.0, 10.0, 59.0)
    assert credit.covers(BACKGROUND, 1.0, 10.0, 61.0)


def test_no_debt_lasts_longer_than_is_remembered_whatever_the_fleet_becomes(credit):
    for _ in range(100):
        credit.admitted(BACKGROUND, 60.0)
    assert not credit.covers(BACKGROUND, 1.0, 1.0, OVER_S - 1)
    assert credit.covers(BACKGROUND, 1.0, 1.0, OVER_S + 1)


def test_a_moment_without_prefill_changes_nothing(credit):
    assert credit.covers(BACKGROUND, 1.0, 10.0, 200.0)
    assert not credit.covers(BACKGROUND, 1.0, 0.0, 201.0)
    credit.admitted(BACKGROUND, 150.0)
    assert credit.covers(BACKGROUND, 1.0, 10.0, 202.0), "what was saved is there"
    credit.admitted(BACKGROUND, 100.0)
    assert not credit.covers(BACKGROUND, 1.0, 0.0, 203.0)
    assert not credit.covers(BACKGROUND, 1.0, 10.0, 204.0), "and so is what was had above it"


def test_time_without_prefill_pays_nothing_back_and_saves_nothing(credit):
    credit.covers(BACKGROUND, 1.0, 10.0, 0.0)
    credit.admitted(BACKGROUND, 1000.0)
    for now_s in range(1, 601):
        assert not credit.covers(BACKGROUND, 1.0, 0.0, now_s)
    assert not credit.covers(BACKGROUND, 1.0, 10.0, 601.0)


def test_time_without_prefill_pays_nothing_back_though_the_class_asks_only_after_it(credit):
    credit.admitted(BACKGROUND, 3000.0)
    credit.passed(10.0, 1.0)
    credit.passed(0.0, 600.0)
    assert not credit.covers(BACKGROUND, 1.0, 10.0, 601.0)
    assert not credit.covers(BACKGROUND, 1.0, 10.0, 600.0 + OVER_S - 2)
    assert credit.covers(BACKGROUND, 1.0, 10.0, 600.0 + OVER_S + 1)


def test_time_with_prefill_is_saved_though_the_class_asks_only_after_it(credit):
    credit.passed(10.0, 200.0)
    assert not credit.covers(BACKGROUND, 1.0, 0.0, 201.0)
    credit.admitted(BACKGROUND, 150.0)
    assert credit.covers(BACKGROUND, 1.0, 10.0, 202.0)


def test_a_class_has_no_credit_from_before_it_has_asked():
    credit = ShareCredit({BACKGROUND: 0.1})
    credit.passed(10.0, 200.0)
    assert credit.covers(BACKGROUND, 1.0, 10.0, 201.0)
    credit.admitted(BACKGROUND, 10.0)
    assert not credit.covers(BACKGROUND, 1.0, 10.0, 202.0)


def test_a_request_that_is_more_than_is_remembered_is_not_within_the_share(credit):
    assert not credit.covers(BACKGROUND, OVER_S + 1, 10.0, 1000.0)
    assert credit.covers(BACKGROUND, OVER_S, 10.0, 1000.0)


def test_what_is_withdrawn_counts_no_more(credit):
    credit.admitted(BACKGROUND, 60.0)
    credit.withdrawn(BACKGROUND, 60.0)
    assert credit.covers(BACKGROUND, 1.0, 10.0, 1.0)
