"""`slackserve top` shows the running deployment."""

import asyncio
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from waiting import assert_soon, at_rest

from deployments.local.ending import kill

pytestmark = pytest.mark.e2e


def top(*arguments):
    """Without an address: it finds the Ray by itself."""
    command = [sys.executable, "-m", "deployments.cli", "top", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
async def long_prompts(deployment):
    """Keeps the prefill replica busy with prompts of 4,000 tokens, several at a time."""
    assert_soon(lambda: at_rest(deployment), 10)
    client = deployment.async_client(wait_s=120)
    enough = asyncio.Event()

    async def ask_again_and_again(number):
        rng = random.Random(number)
        while not enough.is_set():
            await client.completions.create(
                model="tiny",
                prompt=rng.choices(range(200), k=4000),
                max_tokens=2,
                extra_headers={"x-slo-tier": "background" if number else "premium"},
            )

    asking = [asyncio.create_task(ask_again_and_again(number)) for number in range(6)]
    yield
    enough.set()
    await asyncio.gather(*asking)


@pytest.fixture
def younger_ray():
    """A Ray of somebody else's, started after ours: the one that Ray itself would connect to."""
    last = Path("/tmp/ray/ray_current_cluster")
    before = last.read_bytes() if last.exists() else None
    ray = Path(sys.executable).with_name("ray")
    options = ["--port=0", "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [ray, "start", "--head", *options]
    started = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stderr
    address = last.read_text().strip()
    yield address
    # Its GCS server was started without its address: what they all share is the session.
    lines = {process: " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}
    told = [line for line in lines.values() if f"--gcs-address={address}" in line]
    (session,) = {re.search(r"session_[\d_-]+", line)[0] for line in told}
    kill(process for process, line in lines.items() if session in line)
    last.unlink() if before is None else last.write_bytes(before)


@pytest.mark.long
def test_another_ray_on_the_machine_is_passed_over(deployment, younger_ray):
    assert younger_ray != deployment.ray_address()
    assert [replica["work"] for replica in json.loads(top("--json"))["prefill"]] != []


async def test_json_has_the_running_step_its_queue_and_the_decode_replica(deployment, long_prompts):
    frame, replica = {}, {}

    def looks_between_two_steps():
        frame.update(json.loads(top("--json")))
        (answering,) = (replica for replica in frame["prefill"] if replica["work"] is not None)
        replica.update(answering)
        return replica["work"]["step"] is None or not replica["work"]["queue"]

    await asyncio.to_thread(assert_soon, lambda: not looks_between_two_steps(), 120)
    assert frame["model"] == "tiny"
    assert frame["ready"] is True
    assert frame["monitor"]["metrics_port"]
    assert replica["replica"] in {state["replica"] for state in deployment.fleet()["prefill"]}
    assert replica["reports"] is True
    step, queue = replica["work"]["step"], replica["work"]["queue"]
    assert 0.0 <= step["progress"] < 1.0
    assert step["remaining_s"] > 0.0
    assert step["tokens"] >= 4000
    assert all(job["tokens"] == 4000 for job in (*step["jobs"], *queue))
    assert {job["tier"] for job in (*step["jobs"], *queue)} <= {"premium", "background"}
    assert all((job["budget_s"] is None) == (job["tier"] == "background") for job in queue)
    (decode,) = (state for state in frame["decode"] if state["reports"])
    assert decode["replica"] in {state["replica"] for state in deployment.fleet()["decode"]}
    assert decode["running"] >= 1


def test_once_and_without_a_terminal_it_prints_one_frame(deployment):
    assert_soon(lambda: at_rest(deployment), 30)
    with ThreadPoolExecutor(2) as commands:
        asked = [commands.submit(top, *arguments) for arguments in (["--once"], [])]
    for each in asked:
        assert_one_idle_frame(deployment, each.result())


def test_in_a_terminal_it_goes_on_until_ctrl_c_and_leaves_the_terminal_as_it_was(deployment):
    here, there = pty.openpty()
    command = [sys.executable, "-m", "deployments.cli", "top", "--interval", "0.2"]
    process = subprocess.Popen(
        command,
        stdin=there,
        stdout=there,
        stderr=there,
        env=os.environ | {"TERM": "xterm"},
        # A shell has its background jobs ignore Ctrl-C, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    os.close(there)
    drawn = b""
    while drawn.count(b"SlackServe") < 3:
        drawn += os.read(here, 65536)
    process.send_signal(signal.SIGINT)
    drawn += rest_of(here, process)
    assert process.wait(60) == 0
    own_screen, screen_back = b"\x1b[?1049h", b"\x1b[?1049l"
    hidden_cursor, cursor_back = b"\x1b[?25l", b"\x1b[?25h"
    assert drawn.rindex(screen_back) > drawn.rindex(own_screen)
    assert drawn.rindex(cursor_back) > drawn.rindex(hidden_cursor)
    assert b"Traceback" not in drawn


def rest_of(terminal, process):
    """What the process still writes there until it has ended."""
    rest = b""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if not ready and process.poll() is not None:
            break
        if ready:
            try:
                rest += os.read(terminal, 65536)
            except OSError:  # how Linux says that it is closed
                break
    os.close(terminal)
    return rest


def assert_one_idle_frame(deployment, drawn):
    fleet = deployment.fleet()
    assert drawn.startswith("SlackServe  tiny  ready")
    assert drawn.count("SlackServe") == 1
    assert "idle" in drawn
    assert any(f"prefill {state['replica']}" in drawn for state in fleet["prefill"])
    assert any(f"\n{state['replica']} " in drawn for state in fleet["decode"])
