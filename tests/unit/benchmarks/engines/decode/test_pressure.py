"""How the benchmark of decode under pressure judges."""

import pytest

from benchmarks.engines.decode.pressure import summary
from benchmarks.engines.decode.stepped_run import KINDS, PREMIUM


def one(tier, at_s, *token_s, preemptions=0):
    times = {"at_s": at_s, "token_s": list(token_s)}
    return {"tier": tier, "answer": len(token_s), "preemptions": preemptions, **times}


def test_a_run_is_summed_up_by_tier():
    kind = KINDS[PREMIUM]
    asked = [
        one(PREMIUM, 1.0, 0.9 + kind.ttft_s, 0.9 + kind.ttft_s + 0.9 * kind.tpot_s),
        one(PREMIUM, 1.0, 1.1 + kind.ttft_s, 1.1 + kind.ttft_s + kind.tpot_s),
        one(PREMIUM, 1.0, 1.1, 1.1 + 2 * kind.tpot_s, preemptions=2),
        one("standard", 1.0, 1.1, 1.12),
        one("background", 1.0, 60.0, 90.0, preemptions=1),
    ]
    counted = {"computed": 200, "again": 10, "took_s": 5.0, "steps": 50, "fullest": 0.9}
    row = summary({"asked": asked, "step_times": {"step fixed s": 0.003}, **counted})
    assert row["premium met"] == pytest.approx(1 / 3)
    assert row["premium preempted"] == pytest.approx(1 / 3)
    assert (row["standard met"], row["background met"], row["background preempted"]) == (1.0, 1.0, 1.0)
    assert row["again"] == 0.05
    assert row["tokens/s"] == 2.0
    assert row["gap max s"] == 30.0
    assert row["step fixed s"] == 0.003
