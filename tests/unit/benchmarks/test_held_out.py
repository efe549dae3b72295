"""Goodput on streams that were held out, and what is made of it."""

import pytest

from benchmarks.cores import held_out
from benchmarks.cores.held_out import Case, compare, goodputs, ratio_interval
from simulator.arms.arms import ARMS


def test_goodput_falls_with_what_is_asked():
    found = goodputs(Case("8b", "slackserve", 0, 0.0, 1000, 200))
    assert found["all 90%"] >= found["worst class 90%"] >= found["worst class 99%"] > 0
    assert found["all 90%"] >= found["all 99%"]
    assert found == goodputs(Case("8b", "slackserve", 0, 0.0, 1000, 200))


def test_every_arm_has_its_best_setting():
    found = {
        Case("8b", arm, setting, 0.0, seed, 100): {"all 90%": 4.0 if arm == "slackserve" else 1.0 + setting}
        for arm in held_out.NAMES
        for setting in range(len(ARMS[arm].settings))
        for seed in (1000, 1001)
    }
    rows = {row["arm"]: row for row in compare(found)}
    assert rows["sedf-resume"]["setting"] == dict(ARMS["sedf-resume"].settings[-1])
    assert rows["sedf-resume"]["ours over it"] == pytest.approx(4.0 / len(ARMS["sedf-resume"].settings))
    assert (rows["slackserve"]["low"], rows["slackserve"]["high"]) == (1.0, 1.0)


def test_a_ratio_of_pairs_is_narrower_than_the_streams_differ():
    other = [float(value) for value in range(5, 25)]
    low, ratio, high = ratio_interval([1.1 * value for value in other], other)
    assert (low, ratio, high) == pytest.approx((1.1, 1.1, 1.1))
    low, ratio, high = ratio_interval(other[::-1], other)
    assert ratio == pytest.approx(1.0)
    assert (low < 0.8, high > 1.2) == (True, True)
