"""An engine is hung when work waits there and nothing has come of it for too long; then alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.liveness import MAX_LOOK_S, StallAccount, stall_limit_s


def stalled(looks, period_s=0.5):
    """Seconds of stall after looks of (progress, has work), one every period."""
    account = StallAccount()
    for number, (progress, has_work) in enumerate(looks):
        account.look(progress, has_work=has_work, now_s=number * period_s)
    return account.stalled_s


@pytest.mark.parametrize(
    ("pass_s", "limit_s"),
    [(0.0, 5.0), (0.5, 5.0), (1.0, 5.0), (3.0, 15.0), (math.nan, 5.0), (math.inf, 5.0), (-1.0, 5.0)],
)
def test_the_limit_is_five_seconds_or_five_passes(pass_s, limit_s):
    assert stall_limit_s(pass_s) == limit_s


def test_a_longer_limit_can_be_given_and_five_passes_are_longer_still():
    assert [stall_limit_s(pass_s, 30.0) for pass_s in (0.1, 5.9, 7.0, math.nan)] == [30, 30, 35, 30]


def test_work_without_progress_is_a_stall():
    assert stalled([((1, 1), True)] * 13) == pytest.approx(6.0)


def test_an_idle_engine_does_not_stall():
    assert stalled([((1, 1), False)] * 100) == 0.0


def test_work_that_arrives_after_a_long_pause_starts_the_account_anew():
    assert stalled([((1, 1), False)] * 100 + [((1, 1), True)] * 2) == pytest.approx(1.0)


@pytest.mark.parametrize("after", [(2, 1), (1, 2), (0, 0)])
def test_any_change_is_progress(after):
    assert stalled([((1, 1), True)] * 9 + [(after, True)]) == 0.0


def test_who_was_stopped_together_with_the_engine_blames_it_for_nothing():
    account = StallAccount()
    account.look(1, has_work=True, now_s=0.0)
    assert account.look(1, has_work=True, now_s=3600.0) <= MAX_LOOK_S
    assert account.look(2, has_work=True, now_s=3600.5) == 0.0


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.floats(0, 100)), min_size=1))
def test_no_more_is_counted_than_has_passed_since_the_last_progress(looks):
    account, now_s, since_s, before = StallAccount(), 0.0, None, None
    for progress, has_work, later_s in looks:
        now_s += later_s
        if since_s is None or not has_work or progress != before:
            since_s, before = now_s, progress
        stalled_s = account.look(progress, has_work=has_work, now_s=now_s)
        assert 0.0 <= stalled_s <= now_s - since_s + 1e-6
