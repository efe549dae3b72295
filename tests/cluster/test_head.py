"""A cluster whose control plane is in Redis loses its head, and gets another."""

import asyncio
import shutil
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest
from applications import TIER, arguments, is_ready, serving
from fleet import tell
from nodes import Cluster
from ports import free_port
from steady_load import SteadyLoad, reference
from streams import WHOLE, begun_streams, client
from waiting import assert_soon, seconds_until

from deployments.local.ending import kill, kill_after

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.nightly]

AWAY_S = 10.0
STREAMS, TOKENS = 4, 8000
CLIENTS = 3


def serve_config(model, port):
    args = arguments(model, ingress="all", prefill="all", decode="all")
    args["decode"]["engine_kwargs"] = {"max_num_batched_tokens": 512}
    return serving(args, port, on_every_node=True)


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    """The address of a Redis."""
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("needs redis-server, of Debian's package redis-server")
    port = free_port()
    directory = tmp_path_factory.mktemp("redis")
    command = [program, "--port", str(port), "--save", "", "--dir", str(directory)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}"
    server.terminate()
    kill_after(5, [psutil.Process(server.pid)])


@pytest.fixture(scope="module")
def deployed(network, redis, tiny_model):
    """The cluster, the process of its head, and where the other node answers."""
    with Cluster(network.address, {"RAY_REDIS_ADDRESS": redis}) as cluster:
        head = cluster.start_head()
        host = network.add_host()
        cluster.add({TIER: "all"}, 6, host)
        port = free_port()
        config = serve_config(tiny_model, port)
        assert (deployed := cluster.deploy(config)).returncode == 0, deployed.stderr
        url = f"http://{host[1]}:{port}"
        assert_soon(lambda: is_ready(url), 300, "not ready")
        yield SimpleNamespace(cluster=cluster, head=head, url=url)


async def test_the_head_is_lost(deployed):
    """What the other node serves goes on; with a head again the cluster takes deployments as before."""
    cluster = deployed.cluster
    expected = await reference(deployed.url, "none")
    async with client(deployed.url) as http, SteadyLoad(deployed.url, "none", expected, CLIENTS) as load:
        await load.until_answered(time.monotonic(), placed=True)
        calls = await begun_streams(http, STREAMS, TOKENS)
        kill((*deployed.head.children(recursive=True), deployed.head))
        lost_s = time.monotonic()
        answered_s = await load.until_answered(lost_s)
        await asyncio.sleep(max(0.0, lost_s + AWAY_S - time.monotonic()))
        still = sum(not call.done() for call in calls)
        await asyncio.to_thread(cluster.start_head)

        async def is_back():
            return await asyncio.to_thread(lambda: cluster.is_serving() and cluster.monitors())

        await seconds_until(is_back, 120, "the cluster is not as before")
        back_s = round(time.monotonic() - lost_s, 1)
        began_s = time.monotonic()
        await load.until_answered(began_s, placed=True)
        streams = await asyncio.gather(*calls)
    ended = load.since(lost_s)
    errors = [one.error for one in ended if one.error is not None]
    tell(
        "head killed, control plane in Redis",
        away_s=AWAY_S,
        answered_s=round(answered_s, 1),
        answers=len(ended) - len(errors),
        errors=errors,
        streams=STREAMS,
        whole=sum(answer == (TOKENS, WHOLE) for answer in streams),
        back_s=back_s,
    )
    assert still > 0, "no stream ran for as long"
    assert errors == []
    assert streams == [(TOKENS, WHOLE)] * STREAMS
    assert back_s <= 120


@pytest.mark.timeout(600)
async def test_a_node_is_left_while_the_head_is_away(deployed):
    """Streams that the node serves need no head; if it were not waited for they would be cut at once."""
    cluster = deployed.cluster
    node_id = cluster.node_id(**{TIER: "all"})
    async with client(deployed.url) as http:
        calls = await begun_streams(http, STREAMS, TOKENS)
        head = cluster.head
        kill((*head.children(recursive=True), head))
        lost_s = time.monotonic()
        leaving = asyncio.create_task(asyncio.to_thread(cluster.leave, node_id, 100))
        await asyncio.sleep(AWAY_S)
        assert not leaving.done(), "it has given up"
        await asyncio.to_thread(cluster.start_head)
        left = await leaving
        left_s = round(time.monotonic() - lost_s, 1)
        streams = await asyncio.gather(*calls)
    whole = sum(answer == (TOKENS, WHOLE) for answer in streams)
    tell("node left, head killed", away_s=AWAY_S, left_s=left_s, streams=STREAMS, whole=whole)
    assert whole == STREAMS
    # There is no node for its replicas, which stay until `drain_s` before the end: too long for the proxy.
    assert left.returncode == 0 or "SERVE_REPLICA" not in left.stdout, left.stderr + left.stdout
