"""How many requests of a batch are under way."""

import pytest

from deployments.batch.pace import BatchPace


def test_it_halves_with_a_refusal_and_grows_by_one_with_a_round_of_answers():
    pace = BatchPace(16)
    assert pace.room == 16
    pace.refused(now_s=10.0, sent_s=9.0, wait_s=2.0)
    assert (pace.room, pace.next_s) == (8, 12.0)
    for _ in range(8):
        pace.answered()
    assert pace.room == pytest.approx(9, abs=1)
    for _ in range(1000):
        pace.answered()
    assert pace.room == 16


def test_refusals_of_what_was_sent_before_the_last_one_do_not_halve_again():
    pace = BatchPace(16)
    for place in range(8):
        pace.refused(now_s=10.0 + place, sent_s=9.0, wait_s=2.0)
    assert pace.room == 8
    assert pace.next_s == 19.0
    pace.refused(now_s=20.0, sent_s=19.5, wait_s=0.0)
    assert pace.room == 4


def test_one_is_always_sent():
    pace = BatchPace(4)
    for now_s in range(0, 100, 2):
        pace.refused(now_s + 1.0, float(now_s), 0.0)
    assert pace.room == 1


def test_a_server_that_names_no_time_is_left_alone_for_longer_and_longer():
    pace, waits, now_s = BatchPace(4), [], 0.0
    for _ in range(8):
        pace.refused(now_s + 0.1, now_s, None)
        waits.append(round(pace.next_s - now_s - 0.1, 3))
        now_s = pace.next_s
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    pace.answered()
    pace.refused(now_s + 0.1, now_s, None)
    assert pace.next_s - now_s - 0.1 == pytest.approx(1)
