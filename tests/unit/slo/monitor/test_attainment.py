"""What is counted, what the windows forget, and how fast a tier burns its allowance."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo.monitor.attainment import MAX_SERIES, OTHER_TENANTS, Counted, RollingAttainment, Series
from slo.outcomes import Outcome, RequestEnded
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, ObjectiveName

OK = RequestEnded(
    model="m",
    tier=PREMIUM,
    tenant="acme",
    outcome=Outcome.FINISHED,
    e2e_s=1.0,
    ttft_s=0.1,
    ttft_budget_s=0.2,
    tpot_s=0.01,
    tpot_budget_s=0.03,
)
LATE = replace(OK, ttft_s=0.3)
TARGETS = dict.fromkeys(DEFAULT_TIERS.names, 0.99)
LEFT = replace(OK, outcome=Outcome.CANCELLED)


def filled(*requests, at_s=1000.0, long_s=300.0):
    windows = RollingAttainment(long_s)
    for request in requests:
        windows.add(request, at_s)
    return windows


def test_a_tier_that_misses_as_much_as_it_may_burns_at_one():
    windows = filled(*[OK] * 99, LATE)
    burn = windows.burn(PREMIUM, 0.99, windows.short_s, 1000.0)
    assert (burn.missed, burn.judged) == (1, 100)
    assert burn.rate == pytest.approx(1.0)
    assert windows.burn(PREMIUM, 0.999, windows.short_s, 1000.0).rate == pytest.approx(10.0)
    assert windows.burn(STANDARD, 0.99, windows.short_s, 1000.0).rate == 0.0


def test_answers_whose_tokens_cannot_be_timed_count_whether_they_finish_or_fail():
    whole = replace(OK, streamed=False, ttft_s=None, tpot_s=None)
    failed = replace(whole, outcome=Outcome.FAILED)
    windows = filled(*[whole] * 297, *[failed] * 3)
    burn = windows.burn(PREMIUM, 0.99, windows.short_s, 1000.0)
    assert (burn.missed, burn.judged) == (3, 300)
    assert burn.rate == pytest.approx(1.0)
    assert windows.burn(PREMIUM, 0.99, windows.short_s, 1000.0, Counted.PREFILL).judged == 0


def test_what_is_out_of_reach_burns_for_people_and_not_for_steering():
    hopeless = replace(LATE, tpot_budget_s=None, unattainable=(ObjectiveName.TTFT,))
    windows = filled(*[OK] * 99, LATE, *[hopeless] * 100)

    def burn(counted):
        return windows.burn(PREMIUM, 0.99, windows.short_s, 1000.0, counted)[1:]

    assert burn(Counted.ALL) == (101, 200)
    assert burn(Counted.IN_REACH) == burn(Counted.PREFILL) == (1, 100)
    assert windows.over(300.0, 1000.0, 0.99).met == 99


def test_the_short_window_forgets_before_the_long_one_does():
    windows = filled(LATE)

    def missed(window_s, after_s):
        return windows.burn(PREMIUM, 0.99, window_s, 1000.0 + after_s).missed

    assert windows.short_s == 25.0
    assert (missed(windows.short_s, 20.0), missed(windows.long_s, 20.0)) == (1, 1)
    assert (missed(windows.short_s, 60.0), missed(windows.long_s, 60.0)) == (0, 1)
    assert (missed(windows.short_s, 400.0), missed(windows.long_s, 400.0)) == (0, 0)


def test_quantiles_are_within_a_per_cent():
    latencies_s = [random.Random(1).lognormvariate(-2, 1) for _ in range(2000)]
    windows = filled(*(replace(OK, ttft_s=value, e2e_s=2 * value) for value in latencies_s))
    ordered = sorted(latencies_s)
    found = windows.over(300.0, 1000.0, 0.99)
    for quantile, value in zip((0.5, 0.95, 0.99), found.ttft, strict=True):
        assert value == pytest.approx(ordered[int(quantile * 1999)], rel=0.011)
    assert found.e2e.p50 == pytest.approx(2 * found.ttft.p50, rel=0.02)


def test_headroom_is_what_is_left_of_the_budget_at_the_targets_quantile():
    took_half = [replace(OK, ttft_s=0.1)] * 98
    took_double = [replace(OK, ttft_s=0.4)] * 2
    assert filled(*took_half, *took_double).over(300, 1000.0, 0.95).headroom == pytest.approx(0.5, abs=0.01)
    assert filled(*took_half, *took_double).over(300, 1000.0, 0.99).headroom == pytest.approx(-1.0, abs=0.03)
    assert filled(replace(OK, ttft_s=None, tpot_s=None)).over(300, 1000.0, 0.95).headroom is None


@pytest.mark.parametrize("requests", [1, 2, 50, 99, 100, 101, 1000])
@pytest.mark.parametrize("target", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_headroom_is_negative_where_more_miss_than_the_target_allows(requests, target):
    may_miss = int(round(requests * (1 - target), 6))
    for missed in {0, may_miss, may_miss + 1} - {requests + 1}:
        found = filled(*[OK] * (requests - missed), *[LATE] * missed).over(300.0, 1000.0, target)
        assert (found.headroom < 0) is (missed > may_miss), missed


def test_goodput_counts_finished_requests_that_missed_nothing():
    windows = RollingAttainment(300.0)
    for second in range(100):
        windows.add(OK, 1000.0 + second)
        windows.add(LATE, 1000.0 + second)
        windows.add(replace(OK, tier=BACKGROUND, ttft_budget_s=None, tpot_budget_s=None), 1000.0 + second)
        windows.add(replace(OK, outcome=Outcome.CANCELLED), 1000.0 + second)
    assert windows.over(300.0, 1100.0, 0.99).goodput_per_s == pytest.approx(2.0, rel=0.02)
    assert windows.over(300.0, 1100.0, 0.99, tier=BACKGROUND).goodput_per_s == pytest.approx(1.0, rel=0.02)
    assert windows.over(25.0, 1100.0, 0.99).goodput_per_s == pytest.approx(2.0, rel=0.05)


def test_models_tiers_and_tenants_are_counted_apart():
    windows = filled(OK, LATE, replace(OK, tenant="batch"), replace(OK, tier=STANDARD, model="n"))
    assert list(windows.series(1000.0, TARGETS)) == sorted(
        [
            Series("m", PREMIUM, "acme"),
            Series("m", PREMIUM, "batch"),
            Series("n", STANDARD, "acme"),
        ]
    )
    one = windows.series(1000.0, TARGETS)[Series("m", PREMIUM, "acme")]
    assert (one.requests, one.ratio) == (2, 0.5)
    assert windows.over(300.0, 1000.0, 0.99, tier=PREMIUM).requests == 3
    assert windows.over(300.0, 1000.0, 0.99).requests == 4


def test_tiers_without_a_target_are_no_series():
    windows = filled(OK, replace(OK, tier=STANDARD))
    assert list(windows.series(1000.0, {PREMIUM: 0.99})) == [Series("m", PREMIUM, "acme")]


def test_no_number_of_tenants_fills_the_memory():
    windows = filled(*(replace(OK, tenant=f"tenant {number}") for number in range(2 * MAX_SERIES)))
    assert len(windows.series(1000.0, TARGETS)) == MAX_SERIES + 1
    assert Series("m", PREMIUM, OTHER_TENANTS) in windows.series(1000.0, TARGETS)
    assert windows.over(300.0, 1000.0, 0.99).requests == 2 * MAX_SERIES


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 500.0), st.sampled_from([OK, LATE, LEFT]), st.sampled_from(DEFAULT_TIERS.names)
        ),
        max_size=60,
    )
)
def test_a_window_holds_what_is_newer_than_its_length_and_nothing_older_than_a_slice_more(events):
    windows = RollingAttainment(120.0)
    events.sort(key=lambda event: event[0])
    for at_s, ended, tier in events:
        windows.add(replace(ended, tier=tier), at_s)
    for window_s in (windows.short_s, windows.long_s):
        counted = windows.over(window_s, 500.0, 0.9)
        ages_s = [500.0 - at_s for at_s, _, _ in events]
        assert sum(age <= window_s for age in ages_s) <= counted.requests
        assert counted.requests <= sum(age <= window_s + windows.short_s / 2 for age in ages_s)
        assert counted.met <= counted.judged <= counted.requests
        by_tier = [windows.over(window_s, 500.0, 0.9, tier=tier).requests for tier in DEFAULT_TIERS.names]
        assert sum(by_tier) == counted.requests


@pytest.mark.parametrize("told", [list, lambda ages_s: ages_s[::-1]], ids=["newest first", "oldest first"])
def test_what_is_told_late_is_forgotten_by_when_it_ended(told):
    windows = filled(OK)
    for age_s in told([10.0, 150.0, 290.0, 310.0, 900.0]):
        windows.add(LATE, 1000.0, age_s)
    assert windows.over(300.0, 1000.0, 0.99).requests == 4
    assert windows.over(25.0, 1000.0, 0.99).requests == 2
    windows.add(OK, 1100.0)
    assert windows.over(300.0, 1100.0, 0.99).requests == 4, "those of 290 s ago are gone"
    assert len(windows._slices) == 4


def test_what_is_told_late_to_a_new_monitor_ended_before_it_began():
    windows = RollingAttainment(300.0)
    for number in range(400):
        windows.add(OK, 1000.0, number / 2)
    assert windows.over(300.0, 1000.0, 0.99).goodput_per_s == pytest.approx(2.0, rel=0.05)
