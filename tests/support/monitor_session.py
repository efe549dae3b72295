"""A Ray of its own with an SLO monitor, an ingress that misses objectives, a busy router and a slow replica.

Beside it another application with a monitor, in which all is well.

Run as a script: `monitor_session.py PORT DIRECTORY`. Writes a line of JSON about every quarter of a second.
Reads commands from standard input, one a line: `kill` kills the monitor's process, `move PORT` has an ingress
start whose configuration has another port, `upgrade PORT` has an ingress of other code start, `end` ends the
monitor for good, and the end of the input ends everything.
"""

import asyncio
import json
import sys
from dataclasses import replace
from functools import partial
from unittest import mock

import ray

from deployments.monitor import actor
from deployments.monitor.actor import MonitorOptions, start_monitor, stop_monitor
from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand
from slo.monitor.directives import ReplicaSeen
from slo.monitor.messages import IngressSeen, PrefillSeen, Role, RouterSeen
from slo.monitor.settings import MonitorSettings
from slo.monitor.shedding import SteeringRules
from slo.outcomes import Outcome, RequestEnded
from slo.predict.prediction_error import PassMeasured
from slo.request import ReplicaId
from slo.tiers import BACKGROUND, PREMIUM
from telemetry.catalogue import MONITOR_LOST
from telemetry.reporting.monitor_client import MonitorClient, Participant
from telemetry.reporting.monitor_names import find_monitor, monitor_prefix

APPLICATION = "tests"
SLOW = ReplicaId("slow")
MODEL = "tiny"
LATE = RequestEnded(MODEL, PREMIUM, "acme", Outcome.FINISHED, 1.0, ttft_s=0.3, ttft_budget_s=0.2)
PASS = PassMeasured(predicted_s=0.1, corrected_s=0.1, measured_s=0.2)
SETTINGS = MonitorSettings(rules=SteeringRules(tighten_every_s=1.0))
BUSY = FleetDemand(PrefillDemand(0.9, 0.0, capacity=1.0), DecodeDemand(0.5, 3, replicas=1))
OTHER_SETTINGS = MonitorSettings(window_s=60.0)


class Instruments:
    def __init__(self):
        self.lost = None

    def set(self, metric, value, model):
        if metric is MONITOR_LOST:
            self.lost = bool(value)


def exported_at(port):
    return replace(SETTINGS, exported_at=("127.0.0.1", port))


def ingress(port):
    name = f"ingress-{port}"
    return Participant(name, Role.INGRESS, IngressSeen, settings=exported_at(port), model=MODEL)


def participants(corrections, port):
    yield ingress(port)
    yield Participant(
        SLOW,
        Role.PREFILL,
        lambda passes: PrefillSeen(ReplicaSeen(SLOW, None, ()), passes, corrections[-1]),
        correct=corrections.append,
        model=MODEL,
    )
    yield Participant("router", Role.ROUTER, lambda _: RouterSeen({}, {}, BUSY), model=MODEL)


async def run(port):
    options = MonitorOptions({MODEL: exported_at(port)})
    handle = start_monitor(options, APPLICATION)
    corrections = [1.0]
    clients = [
        MonitorClient(it, Instruments(), partial(find_monitor, APPLICATION), 0.1)
        for it in participants(corrections, port)
    ]
    other = MonitorClient(
        Participant("other", Role.INGRESS, IngressSeen, settings=OTHER_SETTINGS, model=MODEL),
        Instruments(),
        partial(start_monitor, MonitorOptions({MODEL: OTHER_SETTINGS}), "other"),
        0.1,
    )
    for client in (*clients, other):
        client.start()
    commands = asyncio.create_task(obey(handle))
    while not commands.done():
        clients[0].note(LATE)
        clients[1].note(PASS)
        policy = clients[0].policy
        line = {
            "version": policy.version,
            "shed": policy.shed_level(BACKGROUND),
            "correction": corrections[-1],
            "lost": clients[0]._instruments.lost,
            "uptime_s": await uptime_s(handle),
            "other_shed": other.policy.shed_level(BACKGROUND),
            "other_lost": other._instruments.lost,
        }
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()
        await asyncio.sleep(0.25)
    await commands


async def uptime_s(handle):
    try:
        return (await asyncio.wait_for(handle.state.remote(), 1.0))["uptime_s"]
    except (ray.exceptions.RayError, TimeoutError):
        return None


def upgrade(port):
    """An ingress starts whose code is another."""
    with mock.patch.object(actor, "monitor_name", lambda application: f"{monitor_prefix(application)}other"):
        start_monitor(MonitorOptions({MODEL: exported_at(port)}), APPLICATION, is_ingress=True)


async def obey(handle):
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while command := (await reader.readline()).decode().strip():
        if command == "kill":
            ray.kill(handle, no_restart=False)
        elif command.startswith("move "):
            coming = ingress(int(command.split()[1]))
            MonitorClient(coming, Instruments(), partial(find_monitor, APPLICATION), 0.1).start()
        elif command.startswith("upgrade "):
            upgrade(int(command.split()[1]))
        elif command == "end":
            stop_monitor(APPLICATION)


if __name__ == "__main__":
    port, directory = sys.argv[1:]
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
    asyncio.run(run(int(port)))
    ray.shutdown()
