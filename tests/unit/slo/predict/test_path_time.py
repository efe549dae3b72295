"""The way besides queue and prefill is learned from the first tokens that nothing has held up."""

import pytest

from slo.predict.path_time import FORGET_AFTER_S, MIN_SAMPLES, REMEMBERED, PathTime
from slo.request import JobId


def learned(*ways_s):
    path = PathTime()
    for number, way_s in enumerate(ways_s):
        path.placed(JobId(str(number)), 1.0, float(number))
        path.ended(JobId(str(number)), 1.0 + way_s)
    return path


def test_until_enough_is_known_what_is_configured_counts_as_one_request():
    assert learned().seconds(0.1) == 0.1
    assert learned(0.02).seconds(0.1) == pytest.approx(0.06)
    assert learned(0.02, 0.03).seconds(0.1) == pytest.approx(0.03)
    assert learned(*[0.02] * MIN_SAMPLES).seconds(10.0) == pytest.approx(0.02)
    assert learned(5.0).seconds(0.1) < 5.0, "one that was held up is not believed"


def test_a_request_that_was_held_up_does_not_count():
    assert learned(0.02, 0.02, 5.0, 0.02, 0.02).seconds(0.1) == pytest.approx(0.02)


def test_the_shortest_way_is_that_of_an_idle_fleet():
    assert learned().least_s(0.1) == 0.1
    assert learned(0.5).least_s(0.1) == 0.1
    busy = learned(0.02, *[0.5] * MIN_SAMPLES)
    assert (busy.least_s(0.1), busy.seconds(0.1)) == (pytest.approx(0.02), pytest.approx(0.5))


@pytest.mark.parametrize("slow", range(1, MIN_SAMPLES))
def test_a_few_slow_first_tokens_of_a_cold_fleet_are_not_believed(slow):
    assert learned(*[3.0] * slow).seconds(0.1) == 0.1


def test_what_nothing_has_confirmed_for_long_counts_no_longer():
    path = learned(*[3.0] * 10)
    path.forget_old(9.0 + FORGET_AFTER_S)
    assert path.seconds(0.1) == 3.0
    path.forget_old(9.1 + FORGET_AFTER_S)
    assert path.seconds(0.1) == 0.1


def test_the_latest_count():
    assert learned(*[0.5] * 100, *[0.02] * REMEMBERED).seconds(0.1) == pytest.approx(0.02)


def test_a_first_token_that_came_too_early_makes_no_negative_way():
    assert learned(*[-0.5] * 10).seconds(0.1) == 0.0


def test_requests_that_queued_or_had_no_first_token_say_nothing():
    path = PathTime()
    for number in range(10):
        path.ended(JobId(f"queued-{number}"), 9.0)
        path.placed(JobId(f"cut-{number}"), 1.0, 0.0)
        path.ended(JobId(f"cut-{number}"), None)
        path.ended(JobId(f"cut-{number}"), 9.0)
    assert path.seconds(0.1) == 0.1


def test_what_a_prefill_takes_longer_than_was_predicted_is_no_way():
    path = PathTime()
    for number, by_s in enumerate([4.0, -0.5] * MIN_SAMPLES):
        path.placed(JobId(str(number)), 1.0, 0.0)
        path.corrected(JobId(str(number)), by_s)
        path.ended(JobId(str(number)), 1.0 + by_s + 0.02)
        path.corrected(JobId(str(number)), by_s)
    assert path.seconds(0.1) == pytest.approx(0.02)
