"""Processes that are there are ended, whatever has ended by itself meanwhile."""

import signal
import subprocess
import sys

import psutil

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
