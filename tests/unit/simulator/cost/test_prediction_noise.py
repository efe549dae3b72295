"""Predictions that are off."""

import math
import statistics
from dataclasses import replace

import pytest

from simulator.arms.arms import ARMS
from simulator.cost.prediction_noise import NoisyPredictor, PredictionNoise
from simulator.fleet.outcome import share
from simulator.study.presets import PRESETS
from simulator.study.run import run
from slo.predict.prefill_time import PrefillPredictor, attention_pairs

EXACT = PrefillPredictor(per_token_s=1e-4, fixed_s=0.003, per_pair_s=1e-9)
PRESET = PRESETS["flowprefill-8b"]


def test_errors_are_log_normal_about_their_bias():
    error = PredictionNoise(0.3, bias=1.2)
    logs = [math.log(error.factor(tokens)) for tokens in range(1, 4001)]
    assert statistics.fmean(logs) == pytest.approx(math.log(1.2), abs=0.02)
    assert statistics.stdev(logs) == pytest.approx(0.3, abs=0.02)
    assert error.factor(77) == PredictionNoise(0.3, bias=1.2).factor(77)
    assert error.factor(77) != PredictionNoise(0.3, bias=1.2, seed=1).factor(77)


@pytest.mark.parametrize("done", [0, 100, 1999])
def test_what_is_left_of_a_prompt_is_mistaken_as_the_whole(done):
    erring = NoisyPredictor.of(EXACT, PredictionNoise(0.5))
    factor = PredictionNoise(0.5).factor(2000)
    assert erring.prefill_s(2000 - done, done) == pytest.approx(factor * EXACT.prefill_s(2000 - done, done))
    pairs = attention_pairs(2000 - done, done)
    assert erring.pass_s(2000 - done, pairs) == pytest.approx(factor * EXACT.pass_s(2000 - done, pairs))
    assert erring.prefill_s(0) == erring.pass_s(0, 0.0) == 0.0


def test_who_predicts_badly_is_on_time_less_often():
    arrivals = PRESET.workload.stream(9.0, 600, 1)
    exact, erring = (
        share(job.is_on_time for job in run(ARMS["slackserve"], replica, arrivals).jobs)
        for replica in (PRESET.hardware, replace(PRESET.hardware, noise=PredictionNoise(1.0)))
    )
    assert erring < exact - 0.02
