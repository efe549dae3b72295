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


def test_a_batch_is_answered_and_goes_on_after_a_crash(deployment, tmp_path):
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    urls = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }
    lines = [
        {
            "custom_id": f"{place}{url}",
            "url": url,
            "body": {"model": "tiny", "max_tokens": 30, "temperature": 0, **body},
        }
        for place in range(20)
        for url, body in urls.items()
    ]
    wrong = {
        "custom_id": "wrong",
        "url": "/v1/completions",
        "body": {"model": "tiny", "max_tokens": -1, "prompt": "a"},
    }
    requests.write_text("".join(json.dumps(line) + "\n" for line in [*lines, wrong]))
    command = [sys.executable, "-m", "deployments.cli", "batch", str(requests), "-o", str(answers)]
    command += ["--url", deployment.url, "--api-key", deployment.keys["acme"], "--at-a-time", "4"]

    def results(path=answers):
        return [json.loads(line) for line in path.read_text().splitlines()]

    crashed = subprocess.Popen(command)
    assert_soon(lambda: answers.exists() and len(results()) > 4, 60)
    crashed.kill()
    crashed.wait(10)
    kept = len(results())
    assert kept < len(lines)
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert run.returncode == 1, run.stderr
    assert f"{kept} of 41 are answered" in run.stderr
    assert sorted(each["custom_id"] for each in results()) == sorted(line["custom_id"] for line in lines)
    texts = {
        each["response"]["body"]["choices"][0].get("text")
        for each in results()
        if "chat" not in each["custom_id"]
    }
    assert len(texts) == 1
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in results()} == {30}
    (failed,) = results(tmp_path / "answers.failed.jsonl")
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"
