"""A `slackserve serve` of this machine and its log, for benchmarks and tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from deployments.local.launcher import get_json

_ROOT = Path(__file__).parents[2]
_EMBEDDED = _ROOT / "deployments" / "configs" / "embedded.yaml"


def embedded_settings(**changes: Any) -> dict[str, Any]:
    """Those of the embedded model, changed, and on ports of their own beside another server."""
    ports = {"kv_transfer": {"prefill_port": 24000, "decode_port": 26000}}
    settings: dict[str, Any] = yaml.safe_load(_EMBEDDED.read_text())
    return settings | ports | changes


def environment() -> dict[str, str]:
    """This process's, and our packages on the path."""
    return {**os.environ, "PYTHONPATH": str(_ROOT)}


def logged(log: str, event: str, field: str) -> list[float]:
    """The values of a field in a server's log lines of one event."""
    return [float(value) for value in re.findall(rf"{event} .*?\b{field}=([\d.e+-]+)", log)]


def serve_until_ready(
    log: Path, port: int, *arguments: str, within_s: float = 400
) -> subprocess.Popen[bytes]:
    """Start the command with `arguments` and wait until it is ready.

    Raises:
        RuntimeError: when it ends or is not ready in time; with the end of its output.
    """
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port), *arguments],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env=environment(),
    )
    deadline_s = time.monotonic() + within_s
    while (get_json(f"http://127.0.0.1:{port}/ready") or {}).get("status") != "ready":
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise RuntimeError(f"the server did not come up:\n{log.read_text()[-6000:]}")
        time.sleep(0.5)
    return process
