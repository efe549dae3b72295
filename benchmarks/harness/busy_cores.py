"""The CPU time of a server and of all its processes, by whose they are."""

from __future__ import annotations

import re
import time
from collections import Counter

import psutil

_NAMES = {
    r"ServeReplica:\w+:(\w+)": lambda name: name.lower(),
    r"ray::(?:SloMonitor|Idle)": lambda _: "monitor",
    r"VLLM::EngineCore": lambda _: "engines",
    r"deployments\.cli|empty_application": lambda _: "command",
}
"""By what a command line matches, whose the process is; all others are Ray's."""


def owner(command: str) -> str:
    """Whose a process is, by its command line."""
    for pattern, named in _NAMES.items():
        if found := re.search(pattern, command):
            return named(found[found.lastindex or 0])
    return "ray"


def cpu_s(root: psutil.Process) -> Counter[str]:
    """CPU seconds that a process and all below it have used, by owner."""
    used: Counter[str] = Counter()
    for each in (root, *root.children(recursive=True)):
        try:
            times, command = each.cpu_times(), " ".join(each.cmdline())
        except psutil.NoSuchProcess:
            continue
        used[owner(command)] += times.user + times.system
    return used


def idle_cores(pid: int, settled_s: float, idle_s: float) -> dict[str, float]:
    """Cores that a process and all below it keep busy while nobody asks for anything, by owner.

    Measured over `idle_s`, after `settled_s` of rest.
    """
    root = psutil.Process(pid)
    time.sleep(settled_s)
    before, started_s = cpu_s(root), time.monotonic()
    time.sleep(idle_s)
    after, elapsed_s = cpu_s(root), time.monotonic() - started_s
    return {name: (after[name] - before[name]) / elapsed_s for name in sorted(after)}
