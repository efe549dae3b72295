"""A cluster whose nodes have a replica each is upgraded under load, and loses a node."""

import asyncio
import contextlib
import copy
import shutil
import time
import tomllib

import psutil
import pytest
from applications import TIER, arguments, is_ready, serving
from fleet import tell
from nodes import ROOT, Cluster
from ports import free_port
from steady_load import SteadyLoad, reference
from streams import WHOLE, begun_streams, client, stream
from waiting import assert_soon, seconds_until

from benchmarks.harness.tiny_models import build_tiny_llama
from deployments.local.ending import kill
from deployments.local.launcher import get_json

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.nightly]

TOKENS = 1500
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def another_version(directory):
    """The code as it was when the monitor was another."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (directory / "slo" / "monitor" / "core.py").open("a") as file:
        file.write("\n# Another version.\n")
    return directory


def serve_config(model, code):
    args = arguments(model, ingress="head", prefill="prefill", decode="decode", max_model_len=4096)
    for tier in ("prefill", "decode"):
        args[tier]["replicas"] = 2
    return serving(args, PORT, {"PYTHONPATH": str(code)})


PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        cluster.start_head(cpus=1)
        yield cluster


@pytest.fixture(scope="module")
def nodes(cluster):
    """Of each tier, the processes of its nodes."""
    return {
        tier: [cluster.add({TIER: tier, "number": str(number)}, cpus=2) for number in range(2)]
        for tier in ("prefill", "decode")
    }


@pytest.fixture(scope="module")
def config(cluster, nodes, tmp_path_factory):
    """What has been deployed, of another version of the code."""
    directory = tmp_path_factory.mktemp("upgrade")
    config = serve_config(build_tiny_llama(directory / "tiny"), another_version(directory / "before"))
    assert (deployed := cluster.deploy(config)).returncode == 0, deployed.stderr
    try:
        assert_soon(lambda: is_ready(URL), 300, "not ready")
    except AssertionError as error:
        raise AssertionError(f"{error}: {states(cluster)}, {get_json(f'{URL}/ready')}") from None
    return config


def states(cluster):
    """What Serve says of each deployment that is not healthy."""
    return {
        name: (one["status"], one["message"], [replica["state"] for replica in one["replicas"]])
        for name, one in cluster.application()["deployments"].items()
        if one["status"] != "HEALTHY"
    }


def changed(config):
    """The same with the code as it is, and another setting."""
    config = copy.deepcopy(config)
    (application,) = config["applications"]
    application["runtime_env"]["env_vars"]["PYTHONPATH"] = str(ROOT)
    application["args"]["handoff_ms"] = 40
    return config


@pytest.mark.timeout(900)
async def test_an_upgrade_under_load(cluster, config):
    (old,) = cluster.monitors()
    expected = await reference(URL, "none")
    async with SteadyLoad(URL, "none", expected) as load:
        await load.until_answered(time.monotonic(), placed=True)
        started_s = time.monotonic()
        deployed = await asyncio.to_thread(cluster.deploy, changed(config))
        assert deployed.returncode == 0, deployed.stderr

        async def has_new_monitor():
            return await asyncio.to_thread(cluster.monitors) - {old}

        monitor_s = await seconds_until(has_new_monitor, 60, "no monitor runs the new code")

        async def is_done():
            return await asyncio.to_thread(cluster.is_serving)

        await seconds_until(is_done, 500, "the upgrade did not end")
        upgraded_s = round(time.monotonic() - started_s, 1)
        await load.until_answered(time.monotonic(), placed=True)
    errors = [one.error for one in load.since(started_s) if one.error is not None]
    answers = len(load.since(started_s)) - len(errors)
    tell("upgrade under load", monitor_s=monitor_s, upgraded_s=upgraded_s, answers=answers, errors=errors)
    assert errors == []
    assert monitor_s <= 30


async def test_a_node_is_lost(cluster, config, nodes):
    """What the other nodes stream goes on, and once there is a node in its place, all is as before."""
    async with client(URL) as http:
        calls = await begun_streams(http, 8, TOKENS)
        before = cluster.running("Decode:tiny")
        lost = nodes["decode"][0]
        kill((*lost.children(recursive=True), lost))
        lost_s = time.monotonic()
        after = await stream(http, 8, lambda: None)
        answered_s = round(time.monotonic() - lost_s, 1)
        answers = await asyncio.gather(*calls)
        whole = sum(answer == (TOKENS, WHOLE) for answer in answers)
        await asyncio.to_thread(cluster.add, {TIER: "decode"}, 2)

        async def is_whole():
            now = await asyncio.to_thread(cluster.running, "Decode:tiny")
            return len(now) == 2 and now != before

        await seconds_until(is_whole, 120, "the replica of the lost node was not replaced")
        back_s = round(time.monotonic() - lost_s, 1)
    tell("node killed", answered_s=answered_s, streams=len(answers), whole=whole, back_s=back_s)
    assert after == (8, WHOLE)
    assert whole >= 3, "streams elsewhere have ended with it"
    assert all(answer == (TOKENS, WHOLE) or "[DONE]" not in answer[1] for answer in answers)


async def test_a_node_is_left(cluster, config, nodes):
    """Its replica starts elsewhere and finishes what it has; then the node may end, and nobody notices."""
    leaving, node_id = nodes["decode"][1], cluster.node_id(**{TIER: "decode", "number": "1"})
    await asyncio.to_thread(cluster.add, {TIER: "decode"}, 2)
    expected = await reference(URL, "none")
    async with client(URL) as http, SteadyLoad(URL, "none", expected, clients=3) as load:
        calls = await begun_streams(http, 8, TOKENS)
        started_s = time.monotonic()
        left = await asyncio.to_thread(cluster.leave, node_id, 180)
        left_s = round(time.monotonic() - started_s, 1)
        leaving.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            await asyncio.to_thread(leaving.wait, 30)
        await load.until_answered(time.monotonic(), placed=True)
        answers = await asyncio.gather(*calls)
        await asyncio.sleep(5)
    ended = load.since(started_s)
    errors = [one.error for one in ended if one.error is not None]
    whole = sum(answer == (TOKENS, WHOLE) for answer in answers)
    tell("node left", left_s=left_s, answers=len(ended) - len(errors), errors=errors, streams=8, whole=whole)
    assert left.returncode == 0, left.stderr
    assert not leaving.is_running()
    assert errors == []
    assert whole == len(answers)
    assert len(await asyncio.to_thread(cluster.running, "Decode:tiny")) == 2
