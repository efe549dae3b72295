"""One real deployment for all end-to-end tests: Ray, two vLLM engines, NIXL, a tiny random model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import yaml
from tiny_models import build_tiny_llama

from deployments.launcher import get_json

START_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Deployment:
    """A running `slackserve serve`."""

    url: str
    model: str
    process: subprocess.Popen
    log: Path
    keys: dict[str, str]

    def client(self, tenant: str | None = "acme", **options) -> openai.OpenAI:
        key = self.keys.get(tenant, "none")
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def fleet(self) -> dict:
        return get_json(f"{self.url}/ready")["fleet"]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all series that carry `labels`, as Prometheus would scrape it."""
        total = 0.0
        for line in self.scrape().splitlines():
            found = re.match(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == f"ray_{name}":
                series = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if all(series.get(label) == value for label, value in labels.items()):
                    total += float(found[3])
        return total

    def scrape(self) -> str:
        ports = Path("/tmp/ray/session_latest").glob("metrics_export_port_*")
        port = next(ports, None)
        address = f"http://127.0.0.1:{port.read_text().strip() if port else 0}/metrics"
        with urllib.request.urlopen(address, timeout=10) as response:
            return response.read().decode()


def start(directory: Path, config: dict, keys: dict[str, str] | None = None) -> Deployment:
    """Run `slackserve serve` on `config` and wait until it is ready."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    log = directory / "serve.log"
    process = subprocess.Popen(
        [sys.executable, "-m", "deployments.cli", "serve", "--config", str(path), "--verbose"],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    url = f"http://127.0.0.1:{config['port']}"
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (get_json(f"{url}/ready") or {}).get("status") != "ready":
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            pytest.fail(f"the deployment did not come up:\n{log.read_text()[-6000:]}")
        time.sleep(0.5)
    return Deployment(url, config.get("model_name", "tiny"), process, log, keys or {})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def deployment(tmp_path_factory, tiny_model):
    keys = {"acme": "key-of-acme", "batch": "key-of-batch"}
    if url := os.environ.get("SLACKSERVE_TEST_URL"):  # one that runs already, with the configuration below
        yield Deployment(url, "tiny", None, None, keys)
        return
    config = {
        "model": str(tiny_model),
        "model_name": "tiny",
        "port": free_port(),
        "max_model_len": 4096,
        "warmup_tokens": [32, 512, 2048],
        "limits": {"max_body_bytes": 200_000},
        "tiers": {
            "premium": {"ttft_ms": 2000, "tpot_ms": 200, "sheddable": False, "weight": 4},
            "standard": {"ttft_ms": 4000, "tpot_ms": 400, "weight": 2},
            "background": {"weight": 1},
        },
        "api_keys": [
            {"tenant": "acme", "key": keys["acme"]},
            {"tenant": "batch", "key": keys["batch"], "highest_tier": "background"},
        ],
    }
    running = start(tmp_path_factory.mktemp("serve"), config, keys)
    yield running
    running.process.terminate()
    running.process.wait(60)
