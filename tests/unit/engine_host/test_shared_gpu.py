"""Engines that share a GPU, each a process: no two take their memory at the same time."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

WORKER = """
import json, os, sys, time
from types import SimpleNamespace
from engine_host.shared_gpu import TakesTurns

class Worker:
    rank = int(sys.argv[2])
    parallel_config = SimpleNamespace(assigned_physical_gpu_ids=json.loads(sys.argv[3]))
    def init_device(self):
        print("begins", time.monotonic(), flush=True)
    def compile_or_warm_up_model(self):
        time.sleep(0.1)  # graphs are captured, and take memory
        print("ended", time.monotonic(), flush=True)

class Sharing(TakesTurns, Worker):
    pass

worker = Sharing()
worker.init_device()
time.sleep(float(sys.argv[1]))
worker.compile_or_warm_up_model()
sys.stdin.read()  # a worker that serves
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start_one(seconds, *, share="0.5", rank=0, gpus=(0,)):
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(seconds), str(rank), json.dumps(gpus)],
            env=os.environ | {"VLLM_RAY_PER_WORKER_GPUS": share, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def said(process, word):
    heard, at_s = process.stdout.readline().split()
    assert heard == word
    return float(at_s)


def test_one_begins_when_the_other_has_its_memory_and_not_when_it_ends(start):
    times = [(said(process, "begins"), said(process, "ended")) for process in [start(0.3) for _ in range(3)]]
    for (_, ended_s), (begins_s, _) in pairwise(sorted(times)):
        assert begins_s >= ended_s


@pytest.mark.parametrize("gpus", [(1,), (2, 1), None])
def test_one_waits_for_each_of_its_gpus(start, gpus):
    """Without numbers those of one host are taken to share one."""
    first = start(60, gpus=gpus and (1, 0))
    said(first, "begins")
    second = start(0, gpus=gpus)
    time.sleep(1.5)
    os.kill(first.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    assert said(second, "begins") > killed_s


def test_one_that_is_killed_gives_its_turn_up(start):
    first = start(60)
    said(first, "begins")
    second = start(0)
    time.sleep(0.5)
    os.kill(first.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    assert killed_s < said(second, "begins") < killed_s + 5


@pytest.mark.parametrize(
    "other",
    [{"share": "1"}, {"rank": 1}, {"gpus": (7,)}],
    ids=["a whole GPU", "a further rank", "another shared GPU"],
)
def test_nobody_else_waits(start, other):
    first = start(60)
    begun_s = said(first, "begins")
    assert said(start(0, **other), "begins") < begun_s + 30
    assert first.poll() is None
