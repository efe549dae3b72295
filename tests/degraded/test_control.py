"""The processes beside the engines fail under load: router, SLO monitor, ingress."""

import asyncio
import os
import signal
import time

import pytest
import ray
from fleet import actor, family
from processes import replicas
from waiting import seconds_until

from engine_host.processes import shared_memory_of
from slo import protocol
from slo.reports import ReplicaGone
from slo.request import ReplicaId

pytestmark = [pytest.mark.e2e, pytest.mark.long]


async def test_the_router_is_killed(fleet):
    async with fleet.under_load("router killed") as fault:
        os.kill(actor("Router#")[1], signal.SIGKILL)
        fault.happens()
        fault.measured["answered_s"] = round(await fault.load.until_answered(fault.at_s), 2)
        placed_s = await fault.load.until_answered(fault.at_s + 0.2, placed=True)
        fault.measured["placed_again_s"] = round(placed_s, 2)
    assert any(not one.placed for one in fault.load.since(fault.at_s)), (
        "no request had to do without the router"
    )
    assert "router_fallback" in fleet.log


async def test_serves_controller_is_killed(fleet):
    """It starts again, and asks each replica for what it is; one that could not answer would be stopped."""
    name = "SERVE_CONTROLLER_ACTOR"
    before = replicas()
    async with fleet.under_load("Serve's controller killed") as fault:
        pid = actor(name)[1]
        os.kill(pid, signal.SIGKILL)
        fault.happens()

        async def is_there():
            return actor(name)[1] not in (None, pid)

        fault.measured["back_s"] = await seconds_until(is_there, 60, "there is no other controller")
        await asyncio.sleep(10)
    assert replicas() == before, "replicas that had not failed were replaced"


@pytest.mark.nightly
async def test_the_router_is_stopped_for_a_while(fleet):
    async with (
        fleet.deployment.http("single") as single,
        fleet.under_load("router stopped for 15 s", counts=False) as fault,
    ):

        async def ask(max_tokens):
            body = {"model": "tiny", "prompt": [1] * 64, "max_tokens": max_tokens, "ignore_eos": True}
            return (await single.post("/v1/completions", json=body)).status_code

        pid = actor("Router#")[1]
        under_way = asyncio.create_task(ask(200))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        fault.happens()
        assert await under_way == 200  # the router does not hear that it ends
        await asyncio.sleep(max(0.0, fault.at_s + 15 - time.monotonic()))
        os.kill(pid, signal.SIGCONT)
        resumed_s = time.monotonic()

        async def admitted():
            return await ask(1) == 200

        fault.measured["admitted_s"] = await seconds_until(
            admitted, 5, "the tenant's request counts for ever"
        )
        fault.measured["placed_again_s"] = round(await fault.load.until_answered(resumed_s, placed=True), 2)


async def test_the_monitor_is_killed(fleet):
    async with fleet.under_load("SLO monitor killed") as fault:
        _, pid = actor("slo-monitor")
        os.kill(pid, signal.SIGKILL)
        fault.happens()

        async def is_back():
            return actor("slo-monitor")[1] not in (None, pid)

        fault.measured["back_s"] = await seconds_until(is_back, 60, "the monitor did not come back")


@pytest.mark.nightly
async def test_one_of_two_ingresses_is_killed(fleet):
    """Only the requests that it had fail; the others do not notice."""
    async with fleet.under_load("ingress killed", may_fail=True, counts=False) as fault:
        before = ingresses()
        os.kill(actor("Ingress#")[1], signal.SIGKILL)
        fault.happens()
        fault.measured["answered_s"] = round(await fault.load.until_answered(fault.at_s), 2)
        await asyncio.sleep(5)
        ended = fault.load.since(fault.at_s)
        had = [one for one in ended if one.started_s < fault.at_s]
        fault.measured["under_way"] = len(had)
        fault.measured["failed"] = sum(one.error is not None for one in ended)

        async def replaced():
            return ingresses() - before

        await seconds_until(replaced, 60, "the ingress was not replaced")
    assert 0 < fault.measured["failed"] < fault.measured["under_way"], ended
    late = [one for one in ended if one.error is not None and one.started_s > fault.at_s + 0.1]
    assert not late, late


def ingresses():
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return {name for name in names if "Ingress#" in name}


async def test_a_report_of_another_protocol_is_refused_with_words(fleet, monkeypatch):
    await fleet.until_whole()
    with monkeypatch.context() as older:
        older.setattr(protocol, "PROTOCOL", 0)
        refused = fleet.handle("Router").report.remote(
            ReplicaGone(ReplicaId((await fleet.fresh("decode"))[0])), model=fleet.deployment.model
        )
        with pytest.raises(Exception, match=r"protocol 0 .* speaks protocol"):
            await refused
    assert len(await fleet.fresh("decode")) == 2, "the router has believed it"


def test_no_process_has_shared_memory_with_a_name(fleet):
    """What has no name goes with its process, however that ends."""
    processes = [one for name in ("Prefill:", "Decode:") for one in family(actor(name)[1])]
    assert len(processes) > 4
    assert not {path for process in processes for path in shared_memory_of(process)}
