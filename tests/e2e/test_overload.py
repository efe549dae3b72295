"""Ten times what a deployment can do for twenty minutes, and how soon it is as it was."""

import asyncio
import itertools
import sys

import numpy as np
import psutil
import pytest
from ports import free_port, side_channels
from serving import deployed
from waiting import assert_soon, at_rest

from benchmarks.harness.tiny_models import build_tiny
from deployments.bench.answer import Fate
from deployments.bench.client import connected
from deployments.bench.load import Asking, Prompts, offer
from simulator.workload.arrivals import Arrival
from slo.admission.rules import AdmissionRules
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(2400)]

TOKENS = 2000
BEFORE_S = 30.0
OVERLOAD_S = 600.0
"""Of premium alone, and then again of all tiers."""
AFTER_S = 90.0
NORMAL_AFTER_S = 60.0
USUAL = 0.5
"""The load before and after, as a part of what the deployment can do."""
MIXED = (PREMIUM, STANDARD, STANDARD, BACKGROUND)
HALF = (PREMIUM, STANDARD)


@pytest.fixture(scope="module")
def overloaded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("overloaded")
    config = {
        # Large enough that ten times its load is few requests a second: the clients share its cores.
        "model": str(build_tiny(directory / "model", "llama", layers=12, hidden=256)),
        "model_name": "tiny",
        "port": free_port(),
        "kv_transfer": side_channels(),
        "monitor": {"port": free_port()},
        "max_model_len": 4096,
        "warmup_tokens": [32, 512, 2048],
        "tiers": {"premium": {"ttft_ms": 2000}, "standard": {"ttft_ms": 4000}},
    }
    with deployed(directory, config) as running:
        yield running


class Clients:
    """Send evenly spaced prompts of one length, none of which is ever cached."""

    def __init__(self, server):
        self._server = server
        self._asking = Asking("tiny", Prompts(range(200)))
        self._numbers = itertools.count()

    async def send(self, *phases):
        """What became of requests of `(name, tiers, per second, seconds)`, one phase after the other."""
        arrivals, began_s = [], 0.0
        for name, tiers, per_s, seconds in phases:
            arrivals += [
                Arrival(
                    next(self._numbers),
                    began_s + at / per_s,
                    name,
                    TOKENS,
                    2,
                    None,
                    tiers[at % len(tiers)],
                )
                for at in range(int(seconds * per_s))
            ]
            began_s += seconds
        return (await offer(self._server, arrivals, self._asking)).ended


def ttfts_s(ended, since_s=0.0):
    """Of premium, from a time on; each was answered."""
    asked = [one for one in ended if one.arrival.tier == PREMIUM and one.arrival.at_s >= since_s]
    assert asked
    assert {one.answer.reason for one in asked} == {""}
    return [one.answer.ttft_s for one in asked]


def memory_bytes(processes):
    return {process: process.memory_info().rss for process in processes}


async def test_an_overload_is_refused_and_forgotten(overloaded, record_property):
    processes = psutil.Process(overloaded.process.pid).children(recursive=True)
    async with connected(overloaded.url, None, 300) as server:
        clients = Clients(server)
        alone = await clients.send(("alone", (STANDARD,), 0.5, 12))
        work_s = float(np.median([one.answer.ttft_s for one in alone]))
        normal = USUAL / work_s
        before = await clients.send(("before", HALF, normal, BEFORE_S))
        await asyncio.to_thread(assert_soon, lambda: at_rest(overloaded), 30)
        memory = memory_bytes(processes)
        ended = await clients.send(
            ("premium", (PREMIUM,), 10 / work_s, OVERLOAD_S),
            ("mixed", MIXED, 10 / work_s, OVERLOAD_S),
            ("after", HALF, normal, AFTER_S),
        )
    await asyncio.to_thread(assert_soon, lambda: at_rest(overloaded), 60)
    assert all(process.is_running() for process in processes), "somebody was replaced"
    after_bytes = memory_bytes(processes)
    grown = sum(after_bytes.values()) / sum(memory.values())
    refused_s = [one.answer.ended_s - one.answer.sent_s for one in ended if one.answer.fate is Fate.REFUSED]
    overload = [one for one in ended if one.arrival.kind != "after"]
    admitted_s = [
        one.answer.ttft_s
        for one in overload
        if one.arrival.tier == PREMIUM and one.answer.fate is Fate.ANSWERED
    ]
    usual_s = ttfts_s(before)
    again_s = ttfts_s(ended, 2 * OVERLOAD_S + NORMAL_AFTER_S)
    record_property("work_s", work_s)
    record_property("requests", {"overload": len(overload), "refused": len(refused_s)})
    record_property("client_late_s", max(one.late_s for one in ended))
    record_property("reasons", sorted({one.answer.reason for one in ended}))
    record_property("refused_s", [float(np.percentile(refused_s, at)) for at in (50, 95, 99, 100)])
    record_property("premium_ttft_s", [float(np.percentile(admitted_s, at)) for at in (50, 99, 100)])
    record_property(
        "slowest_ttft_s",
        {
            tier: max(one.answer.ttft_s for one in overload if one.arrival.tier == tier and one.answer.ttft_s)
            for tier in (PREMIUM, STANDARD)
        },
    )
    record_property("normal_ttft_s", [[float(np.median(one)), max(one)] for one in (usual_s, again_s)])
    record_property("memory_grown", grown)
    record_property(
        "most_grown",
        sorted(((after_bytes[one] - size) / 2**20, _name(one)) for one, size in memory.items())[-4:],
    )
    assert {one.answer.fate for one in ended} == {Fate.ANSWERED, Fate.REFUSED}
    assert len(refused_s) > 0.8 * len(overload)
    log = overloaded.log.read_text()
    assert log.count("-- prefill_accepted ") == log.count("-- request_placed "), "each is placed once"
    assert grown < 1.05
    # At worst it has no more than its share of the fleet, for what it queues at once and what overtakes that.
    rules, share = AdmissionRules(), DEFAULT_TIERS[PREMIUM].share
    assert np.percentile(admitted_s, 99) < (rules.max_late_backlog_s + rules.calm_s) / share
    assert np.median(again_s) < 1.5 * np.median(usual_s)
    assert max(again_s) < 2 * max(usual_s)
    # The clients and the engines have the same cores.
    assert np.percentile(refused_s, 95) < 0.1


def _name(process):
    return " ".join(process.cmdline()).removeprefix(f"{sys.prefix}/")[:40]
