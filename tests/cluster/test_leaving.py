"""Nodes with a proxy each, as pods have: they are left and replaced, and nobody's stream is cut.

Each node has a host of its own, a network namespace, as all proxies listen on the same port.
"""

import asyncio
import contextlib
import os
import signal
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest
from applications import HOSTS, TIER, arguments, is_ready, serving
from fleet import tell
from nodes import Cluster
from ports import free_port
from streams import WHOLE, begun_streams, client
from waiting import assert_soon, seconds_until

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.nightly]

PORT = free_port()
STREAMS, TOKENS = 4, 6000
PREFILL_DRAIN_S, DECODE_DRAIN_S = 300, 10
"""What a node lasts when it is left is as long: its replica is shut down at once."""


def serve_config(model):
    args = arguments(
        model,
        ingress="ingress",
        prefill="prefill",
        decode="decode",
        ingress_replicas=2,
        tiers={"premium": {"ttft_ms": 30_000, "sheddable": False}, "standard": {}, "background": {}},
    )
    args["prefill"]["drain_s"] = PREFILL_DRAIN_S
    args["decode"]["drain_s"] = DECODE_DRAIN_S
    return serving(args, PORT, HOSTS, on_every_node=True)


@pytest.fixture(scope="module")
def cluster(network):
    # A proxy of many on few cores needs a while to start, and would be started anew meanwhile.
    with Cluster(network.address, {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}) as cluster:
        cluster.start_head()
        yield cluster


@pytest.fixture(scope="module")
def add(cluster, network):
    """Adds a node for a tier, as another pod of its group; its process, its address and Ray's id of it."""

    def add(tier):
        host = network.add_host()
        labels = {TIER: tier, "host": host[0]}
        process = cluster.add(labels, 2, host)
        url = f"http://{host[1]}:{PORT}"
        return SimpleNamespace(process=process, url=url, node_id=cluster.node_id(**labels))

    return add


@pytest.fixture(scope="module")
def nodes(add):
    return {tier: add(tier) for tier in ("ingress", "prefill", "decode")} | {"other ingress": add("ingress")}


@pytest.fixture(scope="module")
def config(cluster, nodes, tiny_model):
    """What has been deployed, when every node's proxy says that it is ready."""
    config = serve_config(tiny_model)
    assert (deployed := cluster.deploy(config)).returncode == 0, deployed.stderr
    for name, node in nodes.items():
        assert_soon(lambda url=node.url: is_ready(url), 300, f"{name} is not ready")
    return config


async def end(node):
    """End what Ray has on a node, as its pod would be."""
    with contextlib.suppress(psutil.NoSuchProcess):
        node.process.terminate()
        await asyncio.to_thread(node.process.wait, 60)


@pytest.mark.timeout(900)
async def test_streams_that_only_pass_through_a_node_are_whole_when_it_is_left(cluster, config, nodes):
    node = nodes["prefill"]
    async with client(node.url) as http:
        calls = await begun_streams(http, STREAMS, TOKENS, within_s=60)
        leaving = asyncio.create_task(asyncio.to_thread(cluster.leave, node.node_id, PREFILL_DRAIN_S))

        async def has_no_replica():
            return not await asyncio.to_thread(cluster.running, "Prefill:tiny")

        await seconds_until(has_no_replica, 60, "its replica is still there")
        still = sum(not call.done() for call in calls)
        left = await leaving
        await end(node)
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert still == STREAMS, "no stream outlasted the replica"
    assert left.returncode == 0, left.stderr + left.stdout
    assert answers == [(TOKENS, WHOLE)] * STREAMS


async def test_a_decode_replica_that_starts_without_prefill_answers_alone(cluster, config, nodes):
    """Behind the first test no node is left for the prefill tier."""
    assert not cluster.running("Prefill:tiny")
    (before,) = cluster.running("Decode:tiny")
    os.kill(cluster.pid(before), signal.SIGKILL)
    started_s = time.monotonic()
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4}

    async def is_answered_again():
        with contextlib.suppress(httpx.TransportError):
            answer = await http.post("/v1/completions", json=body)
            return (
                answer.status_code == httpx.codes.OK and answer.headers["x-slo-degraded"] == "local_prefill"
            )
        return False

    async with httpx.AsyncClient(base_url=nodes["ingress"].url, timeout=20) as http:
        await seconds_until(is_answered_again, 150, "decode waits for a prefill replica")
    tell("decode started without prefill", answered_s=round(time.monotonic() - started_s, 1))
    (after,) = cluster.running("Decode:tiny")
    assert after != before


async def test_a_node_that_comes_for_one_that_was_left_is_ready(cluster, config, nodes, add):
    before = cluster.running("Ingress")
    assert len(before) == 2
    node = nodes["ingress"]
    left = await asyncio.to_thread(cluster.leave, node.node_id, DECODE_DRAIN_S + 40)
    assert left.returncode == 0, left.stderr + left.stdout
    await end(node)
    assert is_answered(nodes["other ingress"].url)
    another = nodes["ingress"] = await asyncio.to_thread(add, "ingress")
    await asyncio.to_thread(assert_soon, lambda: is_answered(another.url), 60, "it has no proxy")
    assert len(cluster.running("Ingress") - before) == 1


def is_answered(url):
    """Whether an ingress answers there."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/v1/models", timeout=20).status_code == httpx.codes.OK
    return False
