"""Every worker has cores, and shares them only where there are too few."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.cpu_plan import CorePlan, Workers, plan_cores


@pytest.mark.parametrize(
    ("cores", "replicas", "tp", "expected"),
    [
        ([0, 1], (1, 1), (1, 1), CorePlan(("0",), ("1",))),
        ([0], (1, 1), (1, 1), CorePlan(("0",), ("0",))),
        ([0, 1, 2, 3], (1, 1), (1, 1), CorePlan(("0,1",), ("2",))),
        ([0, 1, 2, 3], (2, 1), (1, 1), CorePlan(("0", "1"), ("2",))),
        ([2, 5, 6], (1, 1), (2, 1), CorePlan(("2|5",), ("6",))),
        (list(range(8)), (1, 1), (2, 1), CorePlan(("0,1,2|3,4,5",), ("6",))),
    ],
)
def test_plans(cores, replicas, tp, expected):
    assert plan_cores(cores, Workers(*replicas, *tp)) == [expected]


@given(st.integers(1, 32), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_every_worker_has_cores_and_none_is_shared_while_there_are_enough(n, prefill, decode, p_tp, d_tp):
    (plan,) = plan_cores(range(n), Workers(prefill, decode, p_tp, d_tp))
    assert (len(plan.prefill), len(plan.decode)) == (prefill, decode)
    ranks = [rank for text in (*plan.prefill, *plan.decode) for rank in text.split("|")]
    assert len(ranks) == prefill * p_tp + decode * d_tp
    used = [int(core) for rank in ranks for core in rank.split(",")]
    assert set(used) <= set(range(n))
    if n >= len(ranks):
        assert len(set(used)) == len(used)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (2, [CorePlan(("0",), ("1",)), CorePlan(("0",), ("1",))]),
        (5, [CorePlan(("0",), ("1",)), CorePlan(("2",), ("3",))]),
        (8, [CorePlan(("0,1,2",), ("3",)), CorePlan(("4,5",), ("6",))]),
    ],
)
def test_models_share_the_machine(cores, expected):
    assert plan_cores(range(cores), Workers(), Workers()) == expected
