"""How `slackserve top` looks at a deployment of which parts do not answer."""

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray._common.network_utils import build_address
from typer.testing import CliRunner

from deployments.cli import app
from deployments.local import running
from deployments.local.running import RunningDeployment
from deployments.top import collect
from deployments.top.collect import Collector, _is_up

WORK = {"preemptible": True, "step": None, "queue": [], "suspended": []}


class FakeDeployment:
    """Answers as Serve's handles do; `serving` are the prefill replicas that Serve would send a call to."""

    def __init__(self, *replicas, silent_s=0.0):
        self.silent_s = dict.fromkeys(replicas, silent_s)
        self.serving = list(replicas)
        self.hanging = set()
        self.asked = []
        self.router_fails = None
        self.monitored = False
        self.ready = True
        self.decode = ("d",)
        self.running = RunningDeployment(
            "tiny",
            "127.0.0.1:1",
            SimpleNamespace(fleet=SimpleNamespace(remote=self._fleet)),
            SimpleNamespace(snapshot=self),
        )

    @asynccontextmanager
    async def choose_replica(self, *, pin):
        yield SimpleNamespace(replica_id=pin if pin in self.serving else self.serving[0])

    async def dispatch(self, chosen, *, pin):
        self.asked.append(chosen.replica_id)
        if chosen.replica_id in self.hanging:
            await asyncio.Event().wait()
        return WORK

    async def _fleet(self):
        if self.router_fails is not None:
            raise self.router_fails
        state = {"kv_usage": 0.0, "outstanding": 1, "outstanding_tokens": 10}
        prefill = [{"replica": name, "reported_s_ago": s, **state} for name, s in self.silent_s.items()]
        state = {"reported_s_ago": 0.0, "kv_usage": 0.5, "running": 2}
        decode = [{"replica": name, **state} for name in self.decode]
        return {"ready": self.ready, "monitored": self.monitored, "prefill": prefill, "decode": decode}


def answers(frame):
    return {replica.replica: replica.work is not None for replica in frame.prefill}


async def test_every_prefill_replica_is_asked_for_its_own_account():
    deployment = FakeDeployment("a", "b")
    frame = await Collector(deployment.running).look(1.0)
    assert answers(frame) == {"a": True, "b": True}
    assert sorted(deployment.asked) == ["a", "b"]
    assert frame.ready
    assert [(replica.running, replica.kv_usage, replica.reports) for replica in frame.decode] == [
        (2, 0.5, True)
    ]


async def test_nobody_answers_in_the_place_of_a_replica_that_is_gone():
    deployment = FakeDeployment("a", "b")
    deployment.serving.remove("b")
    assert answers(await Collector(deployment.running).look(1.0)) == {"a": True, "b": False}
    assert deployment.asked == ["a"]


async def test_a_replica_that_hangs_holds_nobody_up_and_is_not_asked_again_meanwhile():
    deployment = FakeDeployment("a", "b")
    deployment.hanging.add("b")
    collector = Collector(deployment.running)
    for _ in range(3):
        assert answers(await collector.look(0.05)) == {"a": True, "b": False}
    assert sorted(deployment.asked) == ["a", "a", "a", "b"]


async def test_without_the_router_the_replicas_that_are_known_are_shown():
    deployment = FakeDeployment("a")
    collector = Collector(deployment.running)
    await collector.look(1.0)
    deployment.router_fails = RuntimeError("restarting")
    frame = await collector.look(1.0)
    assert frame.ready is None
    assert answers(frame) == {"a": True}
    assert len(frame.decode) == 1


async def test_a_router_that_has_just_started_does_not_make_replicas_vanish():
    deployment = FakeDeployment("a", "b")
    collector = Collector(deployment.running)
    await collector.look(1.0)
    del deployment.silent_s["b"]
    assert answers(await collector.look(1.0)) == {"a": True, "b": True}


async def test_a_replica_that_was_taken_away_is_not_shown_as_one_that_does_not_answer():
    deployment = FakeDeployment("a", "b")
    collector = Collector(deployment.running)
    await collector.look(1.0)
    del deployment.silent_s["b"]
    deployment.serving.remove("b")
    deployment.decode = ()
    frame = await collector.look(1.0)
    assert answers(frame) == {"a": True}
    assert frame.decode == ()


async def test_of_a_router_that_has_just_started_nobody_is_said_to_be_taken_away():
    deployment = FakeDeployment("a")
    collector = Collector(deployment.running)
    await collector.look(1.0)
    deployment.decode, deployment.ready = (), False
    assert len((await collector.look(1.0)).decode) == 1


async def test_of_replicas_that_have_long_been_silent_those_that_answer_are_shown_and_marked():
    deployment = FakeDeployment("a", "b", silent_s=70.0)
    deployment.serving.remove("b")
    frame = await Collector(deployment.running).look(1.0)
    assert answers(frame) == {"a": True}
    assert not frame.prefill[0].reports


@pytest.fixture
def ray_says(monkeypatch):
    """Has `ray.init` fail; undoes what connecting does to the process."""

    def fail(error):
        def init(**_):
            raise error

        monkeypatch.setattr(running.ray, "init", init)

    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "1")
    yield fail
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_when_nothing_runs_it_says_what_to_do(ray_says, option):
    ray_says(ConnectionError("Could not find any running Ray instance."))
    run = CliRunner().invoke(app, ["top", option])
    assert run.exit_code == 1
    assert "top: nothing is running here; start `slackserve serve` first" in run.stderr
    assert run.stdout == ""


def test_a_ray_that_does_not_answer_is_named(ray_says):
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    error.__cause__ = RuntimeError("timed out")
    ray_says(error)
    run = CliRunner().invoke(app, ["top"])
    assert run.exit_code == 1
    assert "10.0.0.1:6379" in run.stderr


def test_an_interrupt_while_it_connects_ends_it_quietly(ray_says):
    ray_says(KeyboardInterrupt())
    run = CliRunner().invoke(app, ["top"])
    assert (run.exit_code, run.stdout) == (0, "")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_rays_address_is_found_in_either_family(host):
    try:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), host, 0)
    except OSError:
        pytest.skip(f"nothing can listen on {host} here")
    address = build_address(host, server.sockets[0].getsockname()[1])
    async with server:
        assert await _is_up(address)
    assert not await _is_up(address)


# The SLO monitor


class Monitor:
    def __init__(self, *roles, uptime_s=1.0):
        self.fails = None
        self.hangs = False
        self.found = 0
        self.says = {"uptime_s": uptime_s, "subscribers": dict.fromkeys(roles, 1)}
        self.state = SimpleNamespace(remote=self._state)

    def find(self):
        self.found += 1
        return [self]

    async def _state(self, model):
        assert model == "tiny"
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await asyncio.Event().wait()
        return self.says


async def test_the_monitor_is_asked_and_looked_for_anew_when_it_fails():
    deployment, monitor = FakeDeployment("a"), Monitor()
    collector = Collector(replace(deployment.running, find_monitors=monitor.find))
    assert (await collector.look(1.0)).monitor == monitor.says
    assert (await collector.look(1.0)).monitor == monitor.says
    assert monitor.found == 1
    monitor.fails = RuntimeError("killed")
    assert (await collector.look(1.0)).monitor is None
    monitor.fails = None
    assert (await collector.look(1.0)).monitor == monitor.says
    assert monitor.found == 2


async def test_after_an_upgrade_the_monitor_is_shown_that_ingress_and_router_report_to(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(collect, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    old, new = Monitor("ingress", "router", "prefill", uptime_s=900.0), Monitor("prefill", uptime_s=5.0)
    there = [old]
    collector = Collector(replace(FakeDeployment("a").running, find_monitors=lambda: iter(there)))

    async def shown(after_s=0.0):
        clock.now_s += after_s
        return (await collector.look(0.2)).monitor

    assert await shown() == old.says
    there.append(new)
    assert await shown(10.0) == old.says, "nobody has come to the new one who asks for places"
    new.says["subscribers"] |= {"ingress": 1, "router": 1}
    assert await shown() == new.says, "who has left the old one counts there for a while"
    old.says["subscribers"] = {}
    old.hangs = True
    assert await shown() == new.says, "whatever ails the old one"


async def test_where_the_code_of_before_is_deployed_again_its_monitor_is_shown():
    old, new = Monitor("ingress", "router", uptime_s=900.0), Monitor("prefill", uptime_s=5.0)
    collector = Collector(replace(FakeDeployment("a").running, find_monitors=lambda: (new, old)))
    assert (await collector.look(1.0)).monitor == old.says
    old.says["subscribers"] = {}
    assert (await collector.look(1.0)).monitor == new.says, "there is no other that anybody reports to"


async def test_a_monitor_is_shown_as_soon_as_the_router_says_that_there_is_one():
    deployment = FakeDeployment("a")
    collector = Collector(deployment.running)
    assert not (await collector.look(1.0)).monitored
    deployment.monitored = True
    assert (await collector.look(1.0)).monitored
    deployment.router_fails = RuntimeError("restarting")
    assert (await collector.look(1.0)).monitored, "the picture stays as it is"
