"""Processes that are there are ended, whatever has ended by itself meanwhile."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from deployments.local.ending import kill, kill_after

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_one_that_has_ended_is_no_obstacle():
    ended, running = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP)
    processes = [psutil.Process(one.pid) for one in (ended, running)]
    ended.kill()
    ended.wait()
    kill(processes)
    assert running.wait(10) == -signal.SIGKILL


def test_those_that_do_not_end_in_time_are_killed_and_counted():
    ending, running = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP)
    processes = {psutil.Process(one.pid) for one in (ending, running)}
    ending.terminate()
    assert kill_after(3.0, processes) == 1
    assert not any(process.is_running() for process in processes)


TERMINAL_IS_CLOSED = """
import contextlib, os, pty, sys
from deployments.local import ending
way, name = sys.argv[1:]
stream = getattr(sys, name)
ours, its = pty.openpty()
os.dup2(its, stream.fileno())
os.close(its)
os.close(ours)
with contextlib.suppress(OSError):
    print("something", file=stream)
getattr(ending, way)(3)
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("way", ["end_process", "end_at_once"])
def test_a_terminal_that_is_closed_changes_no_code(way, name):
    """Python's own is 120 where what has been printed cannot be flushed."""
    command = [sys.executable, "-c", TERMINAL_IS_CLOSED, way, name]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    assert subprocess.run(command, env=buffered, check=False, timeout=60).returncode == 3
