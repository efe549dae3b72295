"""Who can be met comes first, by deadline; who cannot and who has none follow."""

import math

from hypothesis import given
from hypothesis import strategies as st

from slo.queue.slack import NO_DEADLINE, sedf_rank, slack_s

TIMES = st.floats(-1e4, 1e4, allow_nan=False)
WORK = st.floats(0, 1e4, allow_nan=False)


def test_slack_counts_only_the_work_still_to_do():
    assert slack_s(deadline_s=10.0, now_s=4.0, predicted_remaining_s=2.0) == 4.0
    assert slack_s(deadline_s=NO_DEADLINE, now_s=4.0, predicted_remaining_s=2.0) == math.inf


def test_feasible_by_deadline_then_infeasible_then_no_deadline():
    now_s = 100.0
    urgent = sedf_rank(101.0, now_s, 0.5, arrival_s=9)
    relaxed = sedf_rank(200.0, now_s, 0.5, arrival_s=1)
    undated = sedf_rank(NO_DEADLINE, now_s, 0.5, arrival_s=0)
    just_infeasible = sedf_rank(100.4, now_s, 0.5, arrival_s=2)
    long_infeasible = sedf_rank(40.0, now_s, 0.5, arrival_s=2)
    assert sorted([just_infeasible, undated, long_infeasible, relaxed, urgent]) == [
        urgent,
        relaxed,
        long_infeasible,
        just_infeasible,
        undated,
    ]


@given(TIMES, TIMES, TIMES, WORK, WORK)
def test_a_feasible_request_always_goes_before_an_infeasible_one(
    now_s, one_s, other_s, one_work_s, other_work_s
):
    one_ok = slack_s(one_s, now_s, one_work_s) >= 0
    other_ok = slack_s(other_s, now_s, other_work_s) >= 0
    if one_ok and not other_ok:
        assert sedf_rank(one_s, now_s, one_work_s, 5.0) < sedf_rank(other_s, now_s, other_work_s, 0.0)


@given(TIMES, WORK, WORK)
def test_among_feasible_requests_the_earlier_deadline_goes_first(now_s, first_in_s, gap_s):
    first, second = now_s + first_in_s, now_s + first_in_s + gap_s
    assert sedf_rank(first, now_s, 0.0, 0.0) <= sedf_rank(second, now_s, 0.0, 0.0)


def test_equals_go_first_come_first_served():
    assert sedf_rank(5.0, 0.0, 1.0, arrival_s=1.0) < sedf_rank(5.0, 0.0, 1.0, arrival_s=2.0)


@given(TIMES, st.lists(st.tuples(TIMES, WORK), min_size=2, max_size=8))
def test_the_order_is_that_of_the_published_priority(now_s, requests):
    def priority(deadline_s, work_s):
        sign = 1 if slack_s(deadline_s, now_s, work_s) >= 0 else -1
        return sign / max(abs(deadline_s - now_s), 1e-9)

    ranked = sorted(requests, key=lambda r: sedf_rank(r[0], now_s, r[1], 0.0))
    priorities = [priority(*request) for request in ranked]
    assert priorities == sorted(priorities, reverse=True)
