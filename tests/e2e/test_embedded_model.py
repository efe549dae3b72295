"""The command of the README: the embedded model, from the command line to the last process gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import psutil
import pytest
from conftest import free_port

from deployments.launcher import get_json

pytestmark = [pytest.mark.e2e, pytest.mark.embedded]

READY_WITHIN_S = 300
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    port = free_port()
    log = tmp_path_factory.mktemp("embedded") / "log"
    process = subprocess.Popen(
        [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port)],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    url = f"http://127.0.0.1:{port}"
    deadline_s = time.monotonic() + READY_WITHIN_S
    while (get_json(f"{url}/ready") or {}).get("status") != "ready":
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            pytest.fail(f"not ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)
    yield url, process, log
    if process.poll() is None:
        process.kill()


def test_it_knows_the_capital_of_france(served):
    url, _, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    text = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert "Paris" in text.choices[0].text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=question,
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_headers={"x-slo-tier": "premium"},
    )
    pieces = list(stream)
    assert "Paris" in "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert len(pieces) > 5, "it streams"
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_what_it_predicts_is_about_what_it_takes(served):
    url, _, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    ratios = []
    for number in range(3):
        prompt = f"{number} " + "The quick brown fox jumps over the lazy dog. " * 60
        started_s = time.monotonic()
        raw = client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=1)
        predicted_s = float(raw.headers["x-slo-predicted-ttft-ms"]) / 1e3
        ratios.append((time.monotonic() - started_s) / predicted_s)
    assert 0.4 < sorted(ratios)[1] < 2.5, ratios


def test_ctrl_c_stops_it_and_leaves_no_process(served):
    _, process, log = served
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) > 8, "Ray, the replicas and the engines run below it"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, log.read_text()[-2000:]
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert "Ready after" in log.read_text()
