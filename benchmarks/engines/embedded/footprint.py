"""How soon the embedded model's server is ready, and what it keeps busy while nobody asks for anything.

In turns: the command until `/ready` answers 200, its processes' CPU time over a minute without a request, and
the same of a Ray Serve application of as many deployments and one actor that have nothing to do.

    python -m benchmarks.engines.embedded.footprint [--turns 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.busy_cores import idle_cores
from benchmarks.harness.local_server import embedded_settings, ended, environment, served, start_until
from benchmarks.harness.ray_application import says_ready
from benchmarks.report import print_rows, write
from deployments.cli import QUIET_ENVIRONMENT, SERVE_ENVIRONMENT

PORT = 18444
SETTLED_S = 15.0
IDLE_S = 60.0
DEPLOYMENTS = ("Ingress", "Router", "Prefill", "Decode")
OURS = ("ingress", "router", "prefill", "decode", "monitor", "engines", "command")
_EMPTY = "benchmarks.engines.embedded.empty_application"


def server() -> tuple[float, dict[str, float]]:
    """Seconds until the server was ready, and its cores when idle."""
    started_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        served(Path(directory), embedded_settings(port=PORT)) as up,
    ):
        return time.monotonic() - started_s, idle_cores(up.pid, SETTLED_S, IDLE_S)


def empty() -> tuple[float, dict[str, float]]:
    """Those of an application that does nothing."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        log.touch()
        env = {**environment(), **SERVE_ENVIRONMENT, **QUIET_ENVIRONMENT}
        with ended(start_until(lambda: says_ready(log), [_EMPTY, *DEPLOYMENTS], log, env)) as up:
            return time.monotonic() - started_s, idle_cores(up.pid, SETTLED_S, IDLE_S)


def median(turns: list[Mapping[str, float]]) -> dict[str, float]:
    """Of each owner, and of all together."""
    owners = sorted({name for turn in turns for name in turn})
    found = {name: statistics.median(turn.get(name, 0.0) for turn in turns) for name in owners}
    return {**found, "all": statistics.median(sum(turn.values()) for turn in turns)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    ready_s: dict[str, list[float]] = {"server": [], "empty": []}
    cores: dict[str, list[Mapping[str, float]]] = {"server": [], "empty": []}
    for _ in range(turns):
        for arm, measured in (("server", server), ("empty", empty)):
            ready, idle = measured()
            ready_s[arm].append(ready)
            cores[arm].append(idle)
    medians = {arm: median(idle) for arm, idle in cores.items()}
    rows: list[dict[str, Any]] = [
        {"cores of": name, **{arm: medians[arm].get(name, 0.0) for arm in medians}}
        for name in ("all", "ray", *OURS)
    ]
    print_rows("Cores kept busy while idle", rows)
    print(
        "ready after, seconds:", {arm: [round(each, 1) for each in times] for arm, times in ready_s.items()}
    )
    settings = {"turns": turns, "idle_s": IDLE_S, "cores": os.cpu_count()}
    results = {"settings": settings, "ready_s": ready_s, "idle_cores": {"medians": medians, "turns": cores}}
    print(write("engines/footprint", results))


if __name__ == "__main__":
    main()
