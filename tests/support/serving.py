"""Starts real deployments and looks at them as a client and as a Prometheus does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import openai
import psutil
import pytest
import streams
import yaml
from ports import free_port, side_channels

from benchmarks.harness.local_server import end, serve_until_ready
from benchmarks.harness.tiny_models import build_tiny_llama

METRICS_EVERY_S = 1.0
"""How often the processes of a deployment export their metrics; Ray's own default is ten seconds."""

SPANS_EVERY_S = 0.5
"""How often they export spans; OpenTelemetry's own default is five seconds."""


@dataclass(frozen=True)
class Deployment:
    """A running `slackserve serve`."""

    url: str
    model: str
    process: subprocess.Popen
    log: Path
    keys: dict[str, str]
    grpc_port: int | None = None
    monitor_port: int | None = None

    def channel(self) -> grpc.Channel:
        """To the gRPC API."""
        if self.grpc_port is None:
            pytest.skip("the deployment serves no gRPC")
        return grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}")

    def client(self, tenant: str | None = "acme", **options) -> openai.OpenAI:
        return openai.OpenAI(**self._openai(tenant), **options)

    def async_client(self, tenant: str | None = "acme", wait_s: float = 60) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._openai(tenant) | {"timeout": wait_s})

    def http(self, tenant: str | None = "acme", wait_s: float = 60) -> httpx.AsyncClient:
        """For what clients of the API neither send nor show."""
        return streams.client(self.url, self._key(tenant), wait_s)

    def _openai(self, tenant: str | None) -> dict:
        return {"base_url": f"{self.url}/v1", "api_key": self._key(tenant), "max_retries": 0, "timeout": 60}

    def _key(self, tenant: str | None) -> str:
        return self.keys.get(tenant, "none")

    def top(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`slackserve top` of it; of the one that it finds where another process has started it."""
        command = [sys.executable, "-m", "deployments.cli", "top", *arguments]
        environment = dict(os.environ)
        if self.process is not None:
            environment |= {"RAY_ADDRESS": self.ray_address(), "RAY_AUTH_MODE": "token"}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=check, env=environment
        )

    def fleet(self) -> dict:
        """As the router sees it; a machine whose cores others have may keep it from answering in time."""
        key = next(iter(self.keys.values()), "none")
        gives_up_s = time.monotonic() + 20
        while True:
            answer = httpx.get(f"{self.url}/ready", headers={"authorization": f"Bearer {key}"})
            if (fleet := answer.json().get("fleet")) is not None:
                return fleet
            assert time.monotonic() < gives_up_s, answer.text
            time.sleep(0.2)

    def ray_address(self) -> str:
        """Of its own Ray, as `RAY_ADDRESS` takes it: other deployments may run on the machine."""
        return self._of_its_ray(r"--gcs-address=(\S+)")

    def _of_its_ray(self, pattern: str) -> str:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if found := re.search(pattern, " ".join(process.cmdline())):
                    return found[1]
        raise AssertionError("no Ray runs below the deployment")

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

    def _session(self) -> str:
        """The directory of its own Ray; of the latest one where another process has started it."""
        if self.process is None:
            return "/tmp/ray/session_latest"
        return self._of_its_ray(r"(/tmp/ray/session_\d[^/\s]*)")

    def metrics_port(self) -> int:
        """Where Ray exports the metrics of the deployment's processes; 0 before it does."""
        port = next(Path(self._session()).glob("metrics_export_port_*"), None)
        return int(port.read_text()) if port else 0

    def scrape(self) -> str:
        address = f"http://127.0.0.1:{self.metrics_port()}/metrics"
        with urllib.request.urlopen(address, timeout=10) as response:
            return response.read().decode()


@contextmanager
def deployed(
    directory: Path,
    config: dict,
    keys: dict[str, str] | None = None,
    python_path: tuple[Path, ...] = (),
) -> Iterator[Deployment]:
    """`slackserve serve` on `config`, its keys in a file, from when it is ready until the block ends.

    `python_path` comes before our packages.
    """
    if given := config.get("api_keys"):
        keys_file = directory / "keys.yaml"
        keys_file.write_text(yaml.safe_dump(given))
        config = {**config, "api_keys": [], "api_keys_file": str(keys_file)}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    model = config.get("model_name", "tiny")
    running = run_until_ready(
        directory / "serve.log",
        config["port"],
        model,
        keys,
        "--config",
        str(path),
        "--verbose",
        python_path=python_path,
    )
    ports = {name: config.get(name, {}).get("port") for name in ("grpc", "monitor")}
    try:
        yield replace(running, grpc_port=ports["grpc"], monitor_port=ports["monitor"])
    finally:
        end(running.process)


@contextmanager
def serving_tiny(directory: Path, key: str, **settings) -> Iterator[Deployment]:
    """A deployment of the tiny model for one tenant, acme, until the test ends; `settings` come on top."""
    config = {
        "model": str(build_tiny_llama(directory / "tiny")),
        "model_name": "tiny",
        "port": free_port(),
        "kv_transfer": side_channels(),
        "warmup_tokens": [32, 512],
        "preemption": {"stop_within_ms": 10_000},  # whole prompts, however slow the machine
        "monitor": {"port": 0, "shed": False},
        "api_keys": [{"tenant": "acme", "key": key}],
        **settings,
    }
    with deployed(directory, config, {"acme": key}) as running:
        yield running


def run_until_ready(
    log: Path,
    port: int,
    model: str,
    keys: dict[str, str] | None = None,
    *arguments: str,
    python_path: tuple[Path, ...] = (),
) -> Deployment:
    """Run `slackserve serve` with `arguments` on `port` and wait until it is ready."""
    os.environ["RAY_metrics_report_interval_ms"] = f"{METRICS_EVERY_S * 1e3:.0f}"  # noqa: SIM112 - Ray's spelling
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = f"{SPANS_EVERY_S * 1e3:.0f}"
    process = serve_until_ready(log, port, *arguments, python_path=python_path)
    return Deployment(f"http://127.0.0.1:{port}", model, process, log, keys or {})
