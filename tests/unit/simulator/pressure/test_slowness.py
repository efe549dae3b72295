"""How long simulated steps take beside what the model says."""

import math
import statistics

from simulator.pressure.slowness import KEEPS_S, Slowness


def logarithms(slowness, every_s, steps=20_000):
    return [math.log(slowness.factor(step * every_s)) for step in range(steps)]


def correlation(values, lag):
    return statistics.correlation(values[:-lag], values[lag:])


def test_nothing_is_slow_by_itself():
    assert {Slowness(0.0, 0.0, 7).factor(float(step)) for step in range(10)} == {1.0}


def test_noise_is_of_each_step_alone():
    found = logarithms(Slowness(0.1, 0.0, 7), 0.01)
    assert abs(statistics.stdev(found) - 0.1) < 0.01
    assert abs(correlation(found, 1)) < 0.03


def test_a_drift_stays_for_seconds_however_long_steps_are():
    for every_s in (0.1, 0.5):
        found = logarithms(Slowness(0.0, 0.2, 7), every_s)
        assert abs(statistics.stdev(found) - 0.2) < 0.02
        assert abs(correlation(found, round(KEEPS_S / every_s)) - 1 / math.e) < 0.06


def test_both_are_the_same_again_with_the_same_seed():
    first, again, other = (logarithms(Slowness(0.1, 0.2, seed), 0.1, 50) for seed in (7, 7, 8))
    assert first == again != other
