"""However `slackserve serve` ends, it says so, and nothing of it is left."""

import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress

import psutil
import pytest
import yaml
from ports import free_port

from benchmarks.harness.local_server import environment
from benchmarks.harness.tiny_models import build_tiny_llama

pytestmark = pytest.mark.e2e


def family_of(process):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def names(processes):
    found = set()
    for each in processes:
        with suppress(psutil.Error):
            found.add(" ".join(each.cmdline()))
    return " ".join(found)


@contextmanager
def started(tmp_path, once):
    """The command and its processes, once one of that name runs or it says so; none outlives it."""
    path, log, ports = tmp_path / "config.yaml", tmp_path / "log", random.randrange(24_000, 31_000)
    config = {
        "model": str(build_tiny_llama(tmp_path / "tiny")),
        "port": free_port(),
        "kv_transfer": {"prefill_port": ports, "decode_port": ports + 500},
        "model_name": "tiny",
        "monitor": {"port": 0},
    }
    path.write_text(yaml.safe_dump(config))
    # Whoever runs these tests may ignore SIGHUP, and what they start would inherit that.
    hears = ["env", "--default-signal=HUP"]
    command = [*hears, sys.executable, "-m", "deployments.cli", "serve", "--config", str(path)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
    try:
        gives_up_s = time.monotonic() + 180
        while once not in names(family := family_of(process)) + log.read_text():
            assert time.monotonic() < gives_up_s, log.read_text()
            time.sleep(0.1)
        yield process, family, log
    finally:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert names(alive) == ""


def send(number, processes):
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def said_until_its_end(tmp_path, once, *, to_all):
    """What a command says that gets a signal, alone or with all its processes, once one of that name runs."""
    with started(tmp_path, once) as (process, family, log):
        send(signal.SIGTERM, [*(family if to_all else []), psutil.Process(process.pid)])
        assert process.wait(60) == 0, log.read_text()
    said = log.read_text()
    assert "Stopped" in said
    assert "Traceback" not in said
    assert "core_worker" not in said, said
    return said


def test_a_signal_to_all_its_processes_ends_it(tmp_path):
    """So do systemd and `timeout`. Parts of Ray end then; the command waited for them until it aborted."""
    said_until_its_end(tmp_path, "ServeReplica:slackserve:Decode", to_all=True)


def test_a_signal_while_ray_starts_ends_it(tmp_path):
    """Ray has a handler of its own then, which would end it with the signal's number."""
    said = said_until_its_end(tmp_path, "gcs_server", to_all=False)
    assert "Stopping before everything was up." in said


def test_answers_are_finished_when_its_terminal_is_closed(tmp_path):
    """All its processes get SIGHUP then, and Ray's would end with it."""
    asked = {"model": "tiny", "prompt": [1] * 64, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with started(tmp_path, "Ready after") as (process, family, log):
        url = re.search(r"http://\S+", log.read_text())[0] + "/v1/completions"
        body, headers = json.dumps(asked).encode(), {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
            assert answer.readline()
            send(signal.SIGHUP, [*family, psutil.Process(process.pid)])
            assert answer.read().rstrip().endswith(b"data: [DONE]")
        assert process.wait(60) == 0, log.read_text()
    assert "Stopped" in log.read_text()


def test_the_end_of_the_raylet_ends_it(tmp_path):
    """All replicas end with it, and the connections of clients would wait for one that never comes."""
    with started(tmp_path, "Ready after") as (process, family, log):
        (raylet,) = [each for each in family if each.name() == "raylet"]
        raylet.kill()
        assert process.wait(30) == 2, log.read_text()
    assert "Ray has ended" in log.read_text()
