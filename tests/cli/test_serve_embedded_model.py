"""The command of the README: the embedded model, from the command line to the last process gone."""

import signal
import time

import psutil
import pytest
from ports import free_port
from serving import run_until_ready

pytestmark = [pytest.mark.e2e, pytest.mark.embedded]

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    running = run_until_ready(tmp_path_factory.mktemp("embedded") / "log", free_port(), MODEL)
    yield running
    if running.process.poll() is None:
        running.process.kill()


def test_it_knows_the_capital_of_france(served):
    client = served.client()
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
    client = served.client()
    ratios = []
    for number in range(3):
        prompt = f"{number} " + "The quick brown fox jumps over the lazy dog. " * 60
        started_s = time.monotonic()
        raw = client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=1)
        predicted_s = float(raw.headers["x-slo-predicted-ttft-ms"]) / 1e3
        ratios.append((time.monotonic() - started_s) / predicted_s)
    assert 0.4 < sorted(ratios)[1] < 2.5, ratios


def test_ctrl_c_stops_it_and_leaves_no_process(served):
    process, log = served.process, served.log
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) > 8, "Ray, the replicas and the engines run below it"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, log.read_text()[-2000:]
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert "Ready after" in log.read_text()
