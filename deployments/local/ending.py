"""The end of processes, for those who have started them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

import psutil

_KILLED_S: Final = 5.0


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that have not ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_after(within_s: float, processes: Iterable[psutil.Process]) -> int:
    """Wait so many seconds for processes that are about to end; returns how many had to be killed."""
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    kill(alive)
    psutil.wait_procs(alive, timeout=_KILLED_S)
    return len(alive)
