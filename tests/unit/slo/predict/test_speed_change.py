"""When a machine counts as slower or quicker."""

import random

import pytest

from slo.predict.speed_change import BY, SpeedChange


def told(measured):
    speed = SpeedChange(in_a_row=6, remembered=64)
    return [found for size, off in measured if (found := speed.observe(size, off)) is not None]


def noisy(number, off, sizes=(1.0, 4.0, 9.0), seed=1):
    rng = random.Random(seed)
    return [(rng.choice(sizes), off * rng.uniform(0.9, 1.1)) for _ in range(number)]


@pytest.mark.parametrize("factor", [0.4, 0.7, 1.4, 3.0])
def test_it_is_told_once_and_by_how_much(factor):
    change = [*noisy(20, 1.0), *noisy(6, factor, seed=2)]
    assert told(change) == [pytest.approx(factor, rel=0.1)]
    assert told([*change, *noisy(30, 1.0, seed=3)]) == [pytest.approx(factor, rel=0.1)]


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (noisy(200, 1.0), "nothing is off"),
        ([*noisy(20, 1.0), *noisy(5, 2.0, seed=2)], "too few"),
        (noisy(64, 2.0), "they always were"),
        ([*noisy(20, 1.0), *noisy(20, 2.0, sizes=(100.0,), seed=2)], "nothing like them was measured before"),
        ([*noisy(20, 1.0), *[(4.0, 3.0), (4.0, 1.0)] * 20], "every other one was held up"),
        ([*noisy(20, 1.0), *noisy(20, 0.9 * BY, seed=2)], "by little"),
        ([(1.05**n, 1.03**n) for n in range(30)], "the longer they are, the farther off, as ever"),
    ],
)
def test_what_is_no_change_of_speed_is_not_told(measured, why):
    assert not told(measured), why


def test_it_is_told_again_when_it_was_for_a_while_only():
    measured = [*noisy(20, 1.0), *noisy(6, 2.0, seed=2), *noisy(12, 1.0, seed=3), *noisy(6, 0.5, seed=4)]
    assert told(measured) == [pytest.approx(2.0, rel=0.1), pytest.approx(0.5, rel=0.1)]
