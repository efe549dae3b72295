"""The end of processes, for those who have started them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable
from typing import Final, NoReturn, TextIO

import psutil

HANGING: Final = "waits for Ray"
"""The name of a thread that may still wait for a Ray that is gone when everything else has ended."""
_KILLED_S: Final = 5.0


class StopRequested(Exception):  # noqa: N818 - not an error
    """This process shall end before what it starts is up."""


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


def end_process(code: int) -> NoReturn:
    """End this process; at once if a thread still waits for Ray, whose own end would abort it."""
    if any(thread.name == HANGING for thread in threading.enumerate()):
        end_at_once(code)
    _flush()
    sys.exit(code)


def end_at_once(code: int) -> NoReturn:
    """End this process from any thread, with all that has been printed and nothing that runs at its exit."""
    _flush()
    os._exit(code)


def end_within(seconds: float, code: int) -> None:
    """End this process after so many seconds, whatever its threads still wait for."""
    ending = threading.Timer(seconds, os._exit, (code,))
    ending.daemon = True
    ending.start()


def _flush() -> None:
    """Print what waits to be; where nobody takes it, as on a terminal that is closed, it changes no exit."""
    streams: list[TextIO | None] = [sys.stdout, sys.stderr]
    for stream in streams:
        if stream is None:  # closed when the process began
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
