"""Quantiles are values that were there: a fraction of all does not exceed them."""

import math
import random
from fractions import Fraction

import pytest

from slo.monitor.latency_sketch import RELATIVE_ACCURACY, LatencySketch


def sketched(values):
    sketch = LatencySketch()
    for value in values:
        sketch.add(value)
    return sketch


@pytest.mark.parametrize("seed", range(20))
def test_a_quantile_is_the_least_value_that_so_many_do_not_exceed(seed):
    draw = random.Random(seed)
    values = sorted(
        draw.lognormvariate(-2, 2) for _ in range(draw.choice([1, 2, 20, 100, 1000, draw.randint(1, 500)]))
    )
    sketch = sketched(draw.sample(values, len(values)))
    for quantile in ("0", "0.5", "0.55", "0.9", "0.95", "0.99", "0.999", "1"):
        rank = max(0, math.ceil(Fraction(quantile) * len(values)) - 1)
        assert sketch.quantile(float(quantile)) == pytest.approx(values[rank], rel=1.01 * RELATIVE_ACCURACY)


@pytest.mark.parametrize(
    ("count", "slow", "is_seen"),
    [
        (1, 1, True),
        (2, 1, True),
        (99, 1, True),
        (100, 1, False),
        (100, 2, True),
        (1000, 10, False),
        (1000, 11, True),
    ],
)
def test_of_fewer_than_a_hundred_the_slowest_is_the_99th_percentile(count, slow, is_seen):
    spread = sketched([0.2] * (count - slow) + [10.0] * slow).spread()
    assert (spread.p99 > 5) is is_seen


def test_without_any_value_there_is_no_quantile():
    assert LatencySketch().quantile(0.5) is LatencySketch().spread() is None
    assert sketched([None]).spread() is None


def test_what_is_merged_has_the_quantiles_of_all():
    merged = LatencySketch.merged([sketched([0.2]), LatencySketch(), sketched([0.0, 10.0])])
    assert merged.spread() == pytest.approx((0.2, 10.0, 10.0), rel=0.011)
