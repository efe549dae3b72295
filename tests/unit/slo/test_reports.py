"""What a replica tells about itself, and that a number in it that cannot be reckoned with is named."""

import math
from dataclasses import fields, replace

import pytest
from msgspec import structs

from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, OutstandingJob, PrefillReported, ReplicaGone, unsound, who_is_up
from slo.request import JobId, ReplicaId
from slo.tiers import STANDARD

R, OTHER = ReplicaId("r"), ReplicaId("other")
JOB = OutstandingJob(JobId("j"), STANDARD, 10, -3.0, 0.1)
PREFILL = PrefillReported(R, PrefillPredictor(1e-4, 1e-3), (JOB,), None, 0.0)
DECODE = DecodeReported(R, 0.5, 3, tpot_s=0.01)
WRONG = [math.nan, math.inf, -math.inf]


LEARNED = replace(PREFILL, unlearned=PREFILL.predictor)


@pytest.mark.parametrize("report", [PREFILL, LEARNED, DECODE, ReplicaGone(R), replace(PREFILL, jobs=())])
def test_a_sound_report(report):
    assert unsound(report) is None


def spoiled(wrong):
    for name in ("running_for_s", "preemptible_in_s", "kv_usage"):
        yield name, replace(PREFILL, **{name: wrong})
    for part in fields(PrefillPredictor):
        spoiled_line = replace(PREFILL.predictor, **{part.name: wrong})
        yield f"predictor.{part.name}", replace(PREFILL, predictor=spoiled_line)
        yield f"unlearned.{part.name}", replace(PREFILL, unlearned=spoiled_line)
    for name in ("kv_usage", "tpot_s"):
        yield name, replace(DECODE, **{name: wrong})
    for name in ("work_s", "budget_s"):
        yield name, replace(PREFILL, jobs=(structs.replace(JOB, **{name: wrong}),))


@pytest.mark.parametrize("wrong", WRONG)
def test_an_unsound_number_is_named(wrong):
    for name, report in spoiled(wrong):
        assert name in (unsound(report) or "")


def test_no_curve_falls():
    falling = replace(PREFILL, predictor=PrefillPredictor(-1e-4, 1e-3))
    assert "per_token_s" in (unsound(falling) or "")


@pytest.mark.parametrize(
    ("asked", "is_dead", "answer"),
    [
        (R, False, R),
        (R, True, None),
        (None, False, R),
        (None, True, None),
        (OTHER, False, R),
        (OTHER, True, R),
    ],
)
def test_a_dead_engine_is_told_of_by_its_own_replica_alone(asked, is_dead, answer):
    """Serve asks another for one that drains, whose answers go on."""
    assert who_is_up(R, asked, is_dead=is_dead) == answer
