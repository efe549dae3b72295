"""`slackserve calibrate` measures the running prefill tier."""

import json
import subprocess
import sys

import pytest

from deployments.calibration import load_profile

pytestmark = pytest.mark.e2e


def calibrate(*arguments):
    command = [sys.executable, "-m", "deployments.cli", "calibrate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_it_writes_a_profile_and_shows_how_well_it_fits(deployment, tmp_path):
    path = tmp_path / "profile.json"
    run = calibrate("--output", str(path), "--lengths", "64,1024,3000", "--repeats", "2")
    assert run.returncode == 0, run.stderr
    predictor = load_profile(path)
    assert predictor.per_token_s > 0
    profile = json.loads(path.read_text())
    assert len(profile["samples"]) == 6
    assert "residual ms" in run.stderr
    assert f"R² {profile['r_squared']:.5f}" in run.stderr


def test_lengths_that_make_no_line_are_refused(deployment, tmp_path):
    run = calibrate("--output", str(tmp_path / "profile.json"), "--lengths", "64")
    assert run.returncode == 2
    assert "at least two different positive numbers" in run.stderr


def test_a_length_beyond_the_model_is_refused_by_name(deployment, tmp_path):
    run = calibrate("--output", str(tmp_path / "profile.json"), "--lengths", "64,9000")
    assert run.returncode == 2
    assert "9000" in run.stderr
