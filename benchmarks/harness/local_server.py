"""A `slackserve serve` of this machine, its log and a client, for benchmarks and tests."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from deployments.bench.answer import Answer, Fate
from deployments.bench.client import Server, connected
from deployments.bench.load import Asking, Prompts, offer
from deployments.local.launcher import get_json
from simulator.workload.arrivals import Arrival

_ROOT = Path(__file__).parents[2]
_START_S = 400
SPINNING = _ROOT / "benchmarks" / "engines" / "spinning"
"""First on the path, it has NIXL's progress threads spin."""
_EMBEDDED = _ROOT / "deployments" / "configs" / "embedded.yaml"


def embedded_settings(**changes: Any) -> dict[str, Any]:
    """Those of the embedded model, changed, and on ports of their own beside another server."""
    ports = {"kv_transfer": {"prefill_port": 24000, "decode_port": 26000}}
    settings: dict[str, Any] = yaml.safe_load(_EMBEDDED.read_text())
    return settings | ports | changes


def environment(*before: Path) -> dict[str, str]:
    """This process's, and our packages on the path, after other folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*before, _ROOT)))}


def logged(log: str, event: str, field: str) -> list[float]:
    """The values of a field in a server's log lines of one event."""
    return [float(value) for value in re.findall(rf"{event} .*?\b{field}=([\d.e+-]+)", log)]


def serve_until_ready(
    log: Path, port: int, *arguments: str, python_path: tuple[Path, ...] = (), checkout: Path = _ROOT
) -> subprocess.Popen[bytes]:
    """Start the command of a checkout with `arguments` and wait until it is ready.

    `python_path` comes before our packages.

    Raises:
        RuntimeError: as `start_until`.
    """
    command = ["deployments.cli", "serve", "--port", str(port), *arguments]
    url, env = f"http://127.0.0.1:{port}/ready?all", environment(*python_path, checkout)
    return start_until(lambda: (get_json(url) or {}).get("status") == "ready", command, log, env, checkout)


def start_until(
    is_ready: Callable[[], bool], command: list[str], log: Path, env: dict[str, str], cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start one of our modules with arguments, its output in `log`, and wait until it is ready.

    Raises:
        RuntimeError: when it ends or is not ready in time; with the end of its output.
    """
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", *command], stdout=log.open("w"), stderr=subprocess.STDOUT, env=env, cwd=cwd
    )
    deadline_s = time.monotonic() + _START_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise RuntimeError(f"the server did not come up:\n{log.read_text()[-6000:]}")
        time.sleep(0.5)
    return process


@contextmanager
def served(
    directory: Path,
    settings: dict[str, Any],
    python_path: tuple[Path, ...] = (),
    checkout: Path = _ROOT,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server with these settings, its port among them; its log is `log` in the directory."""
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    options = ("--config", str(config), "--verbose")
    log, port = directory / "log", settings["port"]
    with ended(serve_until_ready(log, port, *options, python_path=python_path, checkout=checkout)) as server:
        yield server


def end(process: subprocess.Popen[bytes], within_s: float = 60) -> None:
    """Ask a process to end, and kill it if it does not.

    Raises:
        subprocess.TimeoutExpired: when it had to be killed.
    """
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is asked to end after the block, and killed if it does not."""
    try:
        yield process
    finally:
        with suppress(subprocess.TimeoutExpired):  # what was measured counts all the same
            end(process)


class Client:
    """Asks a server for the completion of random prompts, each used once: no prefix is ever cached."""

    def __init__(self, server: Server, asking: Asking) -> None:
        self._server = server
        self._asking = asking
        self._numbers = itertools.count()

    async def answers(self, *arrivals: Arrival) -> list[Answer]:
        """The answers to requests that are sent at their times.

        Raises:
            RuntimeError: when one is not answered.
        """
        answers, refused = await self.answers_and_refusals(*arrivals)
        if refused:
            raise RuntimeError(f"not answered: {', '.join(refused)}")
        return answers

    async def answers_and_refusals(self, *arrivals: Arrival) -> tuple[list[Answer], Counter[str]]:
        """The same of those that are not refused, and how many are, by status and reason.

        Raises:
            RuntimeError: when one has failed.
        """
        numbered = [replace(arrival, number=next(self._numbers)) for arrival in arrivals]
        ended = [each.answer for each in (await offer(self._server, numbered, self._asking)).ended]
        refused = Counter([answer.reason for answer in ended if answer.fate is Fate.REFUSED])
        answers = [answer for answer in ended if answer.fate is not Fate.REFUSED]
        if reasons := {answer.reason for answer in answers if answer.reason or answer.ttft_s is None}:
            raise RuntimeError(f"not answered: {', '.join(reasons)}")
        return answers, refused

    async def ttfts_s(self, *arrivals: Arrival) -> list[float]:
        """Their times to the first token, seconds."""
        return [answer.ttft_s or 0.0 for answer in await self.answers(*arrivals)]


@asynccontextmanager
async def client(port: int, seed: int | str, vocabulary: range = range(1000, 40000)) -> AsyncIterator[Client]:
    """A client of the server on a port; the tokens of its prompts are drawn from `vocabulary`.

    Two clients of one `seed` ask for the same prompts, one after the other.
    """
    async with connected(f"http://127.0.0.1:{port}", None, timeout_s=300) as server:
        models = await server.models()
        assert models
        yield Client(server, Asking(models[0], Prompts(vocabulary, str(seed))))
