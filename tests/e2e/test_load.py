"""`slackserve bench` against the real deployment."""

import json
import subprocess
import sys

import pytest
from waiting import assert_soon, at_rest

pytestmark = pytest.mark.e2e

MIX = """
kinds:
  chat: {share: 3, mean_tokens: 40, output_tokens: 4, ttft_ms: 30000, tier: premium}
  hopeless: {share: 1, is_uniform: true, range_tokens: [500, 900], output_tokens: 4, ttft_ms: 1}
"""


def bench(deployment, *arguments):
    command = [sys.executable, "-m", "deployments.cli", "bench", "--url", deployment.url, *arguments]
    key = ("--api-key", deployment.keys["acme"])
    return subprocess.run([*command, *key], capture_output=True, text=True, check=False, timeout=180)


def test_load_is_answered_scored_and_refused(deployment, tmp_path):
    assert_soon(lambda: at_rest(deployment), 30)
    mix, path = tmp_path / "mix.yaml", tmp_path / "run.json"
    mix.write_text(MIX)
    shape = ("--rate", "4", "--requests", "24", "--vocabulary", "0-255", "--seed", "1")
    run = bench(deployment, "--mix", str(mix), *shape, "--json", str(path))
    assert run.returncode == 0, run.stderr
    found = json.loads(path.read_text())
    chat, hopeless = found["kinds"]["chat"], found["kinds"]["hopeless"]
    assert found["model"] == "tiny"
    assert chat["requests"] + hopeless["requests"] == 24
    assert chat["attainment"] == 1.0, found
    assert chat["ttft_ms"]["p50"] > 0
    assert chat["tpot_ms"]["p50"] > 0
    assert not found["overall"]["failed"]
    # 1 ms is too little for any prompt, and `standard` may be refused.
    assert hopeless["attainment"] == 0
    assert hopeless["refused"] == {"429 deadline_infeasible": hopeless["requests"]}
    assert "429 deadline_infeasible" in run.stdout


def test_a_model_that_is_not_served(deployment):
    run = bench(deployment, "--model", "tinny")
    assert run.returncode == 2
    assert "did you mean 'tiny'?" in run.stderr
