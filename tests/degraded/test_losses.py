"""Parts of the fleet are lost under load: two prefill replicas, one decode replica, a handful of clients.

Nobody waits without an answer, and nobody gets an error where the fleet can still answer. What was measured
is printed as one line of JSON for each loss.
"""

import asyncio
import json
import os
import random
import re
import signal
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import ray
from serving import Deployment, free_port, start
from steady_load import WAIT_S, SteadyLoad
from waiting import at_rest

from benchmarks.engines.tiny_models import build_tiny_llama

pytestmark = pytest.mark.e2e

KEY = "key-of-acme"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    if url := os.environ.get("SLACKSERVE_LOSSES_URL"):  # one that runs already, with the configuration below
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        yield Deployment(url, "tiny", None, Path(os.environ["SLACKSERVE_LOSSES_LOG"]), {"acme": KEY})
        ray.shutdown()
        return
    ports = random.randrange(24_000, 31_000)
    config = {
        "model": str(build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")),
        "model_name": "tiny",
        "port": free_port(),
        "kv_transfer": {"prefill_port": ports, "decode_port": ports + 500},
        "max_model_len": 4096,
        "warmup_tokens": [32, 512],
        "prefill": {"replicas": 2},
        "monitor": {"port": 0, "shed": False},
        "tiers": {
            "premium": {"ttft_ms": 30_000, "sheddable": False, "weight": 4},
            "standard": {"ttft_ms": 30_000, "weight": 2},
            "background": {"weight": 1},
        },
        "api_keys": [{"tenant": "acme", "key": KEY}],
    }
    running = start(tmp_path_factory.mktemp("serve"), config, {"acme": KEY})
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    yield running
    ray.shutdown()
    running.process.terminate()
    running.process.wait(60)


@pytest.fixture
def tell(capsys, record_property):
    """Put a result into the output of the tests."""

    def write(what, **values):
        record_property(what, values)
        with capsys.disabled():
            print("\n" + json.dumps({"lost": what, **values}))  # noqa: T201 - the measurements

    return write


def actor(part, suffix=""):
    """The (name, namespace, process id) of an actor."""
    for one in ray.util.list_named_actors(all_namespaces=True):
        if part in one["name"] and one["name"].endswith(suffix):
            handle = ray.get_actor(one["name"], namespace=one["namespace"])
            return handle, ray._private.state.actors(handle._actor_id.hex())["Pid"]
    return None, None


def family(pid):
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def summary(load, wasted_s):
    ended = load.since(wasted_s)
    return {
        "answers": sum(one.error is None for one in ended),
        "errors": [one.error for one in ended if one.error is not None],
        "longest_s": round(max((one.ended_s - one.started_s for one in ended), default=0.0), 2),
    }


def replaced(deployment):
    """Replacements that the decode replica has logged, as (cause, outcome)."""
    lines = deployment.log.read_text().splitlines()
    return [line for line in lines if "prefill_failed" in line]


async def prefill_replicas(deployment):
    fleet = await asyncio.to_thread(deployment.fleet)
    return {one["replica"]: one for one in fleet["prefill"]}


async def until(condition, within_s, message):
    started_s = time.monotonic()
    while not await condition():
        assert time.monotonic() - started_s < within_s, f"{message} within {within_s} s"
        await asyncio.sleep(0.05)
    return round(time.monotonic() - started_s, 2)


async def busiest(deployment):
    """The prefill replica with the most to do, once it has something."""
    while True:
        replicas = await prefill_replicas(deployment)
        name, state = max(replicas.items(), key=lambda one: one[1]["outstanding"])
        if state["outstanding"] >= 3:
            return name


async def test_a_prefill_replica_the_router_and_the_monitor_are_killed_and_one_drains(deployment, tell):
    async with SteadyLoad(deployment.url, KEY) as load:
        await load.until_answered(time.monotonic(), placed=True)
        await lose_prefill(deployment, load, tell)
        await lose_router(deployment, load, tell)
        await lose_monitor(load, tell)
        await drain(deployment, load, tell)
    everybody = [one.ended_s - one.started_s for one in load.asked]
    assert max(everybody) < WAIT_S
    await until(lambda: asyncio.to_thread(at_rest, deployment), 30, "the fleet did not come to rest")


async def lose_prefill(deployment, load, tell):
    processes = {name: family(actor("Prefill:", name)[1]) for name in await prefill_replicas(deployment)}
    lost = await busiest(deployment)
    processes[lost][0].kill()
    wasted_s = time.monotonic()

    async def forgotten():
        replica = (await prefill_replicas(deployment)).get(lost)
        return replica is None or replica["reported_s_ago"] > 1.5

    noticed_s = await until(forgotten, 5, "the router went on using a dead replica")
    answered_s = round(await load.until_answered(wasted_s, placed=True), 2)
    await asyncio.sleep(5)
    losses = replaced(deployment)
    result = summary(load, wasted_s)
    tell("prefill replica", noticed_s=noticed_s, answered_s=answered_s, replacements=len(losses), **result)
    assert result["errors"] == [], losses
    assert losses, "nobody had lost anything; was the right process killed?"
    _, alive = psutil.wait_procs(processes[lost], timeout=20)
    assert not alive, f"left behind: {[' '.join(process.cmdline()) for process in alive]}"


async def lose_router(deployment, load, tell):
    _, pid = actor("Router#")
    os.kill(pid, signal.SIGKILL)
    wasted_s = time.monotonic()
    answered_s = round(await load.until_answered(wasted_s), 2)
    placed_s = round(await load.until_answered(wasted_s + 0.2, placed=True), 2)
    result = summary(load, wasted_s)
    tell("router", answered_s=answered_s, placed_again_s=placed_s, **result)
    assert result["errors"] == []
    assert any(not one.placed for one in load.since(wasted_s)), "no request had to do without the router"
    assert "router_fallback" in deployment.log.read_text()


async def lose_monitor(load, tell):
    _, pid = actor("slo-monitor")
    if pid is None:
        tell("monitor", skipped="there is no SLO monitor")
        return
    os.kill(pid, signal.SIGKILL)
    wasted_s = time.monotonic()
    answered_s = round(await load.until_answered(wasted_s, placed=True), 2)
    await until(lambda: asyncio.to_thread(is_back, pid), 60, "the monitor did not come back")
    back_s = round(time.monotonic() - wasted_s, 2)
    result = summary(load, wasted_s)
    tell("monitor", answered_s=answered_s, back_s=back_s, **result)
    assert result["errors"] == []


def is_back(pid):
    return actor("slo-monitor")[1] not in (None, pid)


async def drain(deployment, load, tell):
    """Shut one of two replicas down the way Serve does when it scales down or upgrades."""

    async def both():
        replicas = await prefill_replicas(deployment)
        return sum(one["reported_s_ago"] < 1.5 for one in replicas.values()) >= 2

    with load.paused():
        both_s = await until(both, 120, "the lost prefill replica was not replaced")
    leaving = await busiest(deployment)
    handle, pid = actor("Prefill:", leaving)
    started_s = time.monotonic()
    shutdown = handle.perform_graceful_shutdown.remote()

    async def told():
        return (await prefill_replicas(deployment))[leaving]["draining"]

    told_s = await until(told, 5, "the router did not hear of it")
    outstanding = [(await prefill_replicas(deployment))[leaving]["outstanding"]]
    while not (await asyncio.to_thread(ray.wait, [shutdown], timeout=0.05))[0]:
        replica = (await prefill_replicas(deployment)).get(leaving)
        outstanding.append(0 if replica is None else replica["outstanding"])
        assert time.monotonic() - started_s < 40, "the replica did not end"
    drained_s = time.monotonic() - started_s
    os.kill(pid, signal.SIGKILL)  # as Serve does then
    await load.until_answered(time.monotonic(), placed=True)
    result = summary(load, started_s)
    tell(
        "drained replica",
        waited_for_replacement_s=both_s,
        told_s=told_s,
        drained_s=round(drained_s, 2),
        outstanding=outstanding,
        **result,
    )
    assert result["errors"] == []
    assert all(later <= earlier for earlier, later in pairwise(outstanding))
    assert re.search(r"prefill_drained .*is_empty=True", deployment.log.read_text())
