"""The hosts of the two tiers lose each other; the head still reaches both."""

import asyncio
import time

import httpx
import pytest
from applications import HOSTS, TIER, arguments, is_ready, serving
from fleet import tell
from nodes import Cluster
from ports import free_port
from steady_load import SteadyLoad, reference
from streams import WHOLE, begun_streams, client
from waiting import assert_soon, seconds_until

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.nightly]

PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"
CUT_S = 20.0
STREAMS, TOKENS = 4, 8000
CLIENTS = 3


def serve_config(model):
    args = arguments(model, ingress="head", prefill="prefill", decode="decode")
    args["decode"]["engine_kwargs"] = {"max_num_batched_tokens": 512}
    return serving(args, PORT, HOSTS)


@pytest.fixture(scope="module")
def cluster(network, tiny_model):
    with Cluster(network.address) as cluster:
        cluster.start_head(cpus=1)
        for tier in ("prefill", "decode"):
            cluster.add({TIER: tier}, 2, network.add_host())
        config = serve_config(tiny_model)
        assert (deployed := cluster.deploy(config)).returncode == 0, deployed.stderr
        assert_soon(lambda: is_ready(URL), 300, "not ready")
        yield cluster


def given_up(cluster):
    """How many prefills decode has not waited for any longer."""
    logs = cluster.directory.glob("head-0/session_latest/logs/worker-*.err")
    return sum(path.read_text(errors="replace").count("prefill_failed request_id") for path in logs)


def is_at_rest():
    fleet = httpx.get(f"{URL}/ready").json()["fleet"]
    return all(one["kv_usage"] == 0 for tier in ("prefill", "decode") for one in fleet[tier])


async def test_the_tiers_lose_each_other(cluster, network):
    """Streams go on, new prompts are computed by decode; when the network is back, by prefill again."""
    expected = await reference(URL, "none")
    async with client(URL) as http, SteadyLoad(URL, "none", expected, CLIENTS) as load:
        calls = await begun_streams(http, STREAMS, TOKENS)
        before = given_up(cluster)
        network.cut()
        cut_s = time.monotonic()
        answered_s = await load.until_answered(cut_s)
        await asyncio.sleep(max(0.0, cut_s + CUT_S - time.monotonic()))
        still = sum(not call.done() for call in calls)
        network.heal()
        healed_s = time.monotonic()
        during = given_up(cluster) - before

        async def is_back():
            known = given_up(cluster)
            began_s = time.monotonic()
            for _ in range(5):
                await load.until_answered(time.monotonic())
            return given_up(cluster) == known and load.slowest_s(began_s) < 2.0

        await seconds_until(is_back, 120, "prompts do not go through prefill again")
        back_s = round(time.monotonic() - healed_s, 1)
        streams = await asyncio.gather(*calls)
    ended = load.since(cut_s)
    errors = [one.error for one in ended if one.error is not None]
    tell(
        "partition between the tiers",
        cut_s=CUT_S,
        given_up=during,
        answers=len(ended) - len(errors),
        errors=errors,
        answered_s=round(answered_s, 1),
        slowest_first_token_s=round(load.slowest_s(cut_s), 2),
        streams=STREAMS,
        whole=sum(answer == (TOKENS, WHOLE) for answer in streams),
        back_s=back_s,
    )
    assert during > 0, "nobody noticed; was anything cut?"
    assert still > 0, "no stream ran for as long"
    assert errors == []
    assert streams == [(TOKENS, WHOLE)] * STREAMS
    await asyncio.to_thread(assert_soon, is_at_rest, 60, "KV blocks are left")
