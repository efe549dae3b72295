"""A `slackserve serve` of this machine, for benchmarks and tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from deployments.launcher import get_json


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
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    deadline_s = time.monotonic() + within_s
    while (get_json(f"http://127.0.0.1:{port}/ready") or {}).get("status") != "ready":
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise RuntimeError(f"the server did not come up:\n{log.read_text()[-6000:]}")
        time.sleep(0.5)
    return process
