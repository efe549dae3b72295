"""`slackserve calibrate` measures the running prefill tier."""

import json
import subprocess
import sys

import pytest

from deployments.calibrate.profile import load_profile
from deployments.config import ConfigError
from slo.files.profile import read_profile

pytestmark = pytest.mark.e2e


def calibrate(*arguments):
    command = [sys.executable, "-m", "deployments.cli", "calibrate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_it_writes_a_profile_and_shows_how_well_it_fits(deployment, tmp_path):
    path = tmp_path / "profile.json"
    run = calibrate("--output", str(path), "--repeats", "1")
    assert run.returncode == 0, run.stderr
    predictor = load_profile(path)
    assert 0 < predictor.prefill_s(64) < predictor.prefill_s(3000) < 30
    profile = json.loads(path.read_text())
    for sample in profile["samples"]:  # however the fit divides the time between tokens and their pairs
        predicted_s = predictor.prefill_s(sample["tokens"], sample["context_tokens"])
        assert 1 / 4 < predicted_s / sample["measured_s"] < 4, sample
    assert len([sample for sample in profile["samples"] if sample["context_tokens"] == 0]) == 5
    assert {sample["context_tokens"] for sample in profile["samples"]} == {0, 896, 1920}, "in blocks of 128"
    assert "residual ms" in run.stderr
    assert f"R² {profile['r_squared']:.5f}" in run.stderr
    assert {sample["tokens"] for sample in profile["handoffs"]} == {32, 512, 4090}, "with room for an answer"
    assert profile["about"]["model"] == "tiny"
    assert profile["about"]["dtype"] == "float32"
    assert 0 < predictor.handoff_s < 10
    transfer = read_profile(path, ConfigError).transfer
    assert transfer is not None
    assert 0 < transfer.transfer_s(1000) < 10
    assert "KV transfer" in run.stderr
    assert_it_can_be_checked(path)


def assert_it_can_be_checked(path):
    written = path.read_text()
    run = calibrate("--check", str(path), "--prompts", "4")
    assert run.returncode == 0, run.stderr
    assert "prefill: MAPE" in run.stderr
    assert "handoff: MAPE" in run.stderr
    assert path.read_text() == written
    path.write_text(written.replace('"float32"', '"bfloat16"'))
    run = calibrate("--check", str(path))
    assert run.returncode == 2
    assert "dtype bfloat16 is not float32" in run.stderr.replace("\n", " ")


def test_lengths_that_make_no_line_are_refused(deployment, tmp_path):
    run = calibrate("--output", str(tmp_path / "profile.json"), "--lengths", "64")
    assert run.returncode == 2
    assert "at least two different positive numbers" in run.stderr


def test_a_length_beyond_the_model_is_refused_by_name(deployment, tmp_path):
    run = calibrate("--output", str(tmp_path / "profile.json"), "--lengths", "64,9000")
    assert run.returncode == 2
    assert "9000" in run.stderr
