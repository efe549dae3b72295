"""A report with a number that cannot be reckoned with is told by that number's name."""

import math
from dataclasses import fields, replace

import pytest
from msgspec import structs

from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, OutstandingJob, PrefillReported, ReplicaGone, unsound
from slo.request import JobId, ReplicaId
from slo.tiers import STANDARD

R = ReplicaId("r")
JOB = OutstandingJob(JobId("j"), STANDARD, 10, -3.0, 0.1)
PREFILL = PrefillReported(R, PrefillPredictor(1e-4, 1e-3), (JOB,), None, 0.0)
DECODE = DecodeReported(R, 0.5, 3, tpot_s=0.01)
WRONG = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("report", [PREFILL, DECODE, ReplicaGone(R), replace(PREFILL, jobs=())])
def test_a_sound_report(report):
    assert unsound(report) is None


def spoiled(wrong):
    for name in ("running_for_s", "preemptible_in_s", "kv_usage"):
        yield name, replace(PREFILL, **{name: wrong})
    for part in fields(PrefillPredictor):
        yield part.name, replace(PREFILL, predictor=replace(PREFILL.predictor, **{part.name: wrong}))
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
