"""A thousand clients that read slowly and a thousand that send slowly, and what the others notice of them."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import slow_clients
from waiting import assert_soon, at_rest

from deployments.bench.answer import Fate
from deployments.bench.client import connected
from deployments.bench.load import Asking, Prompts, offer
from simulator.workload.arrivals import Arrival
from slo.tiers import STANDARD

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

EACH = 1000
RAMP_S = 30.0
SPAN_S = 60.0
EVERY_S = 0.25


async def ask(deployment):
    """Seconds that others wait for short answers, four of them in each second, and what failed."""
    asking = Asking("tiny", Prompts(range(200)))
    arrivals = [
        Arrival(number, number * EVERY_S, "other", 64, 4, None, STANDARD)
        for number in range(int(SPAN_S / EVERY_S))
    ]
    async with connected(deployment.url, deployment.keys["acme"], 60) as server:
        ended = (await offer(server, arrivals, asking)).ended
    failed = [one.answer.reason for one in ended if one.answer.fate is not Fate.ANSWERED]
    return [one.answer.ended_s - one.answer.sent_s for one in ended], failed


def p95(seconds):
    return float(np.percentile(seconds, 95))


async def crowd(deployment, how, uploads):
    """The process of a crowd that has begun to connect."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(slow_clients.__file__)),
        *(deployment.url, deployment.keys["crowd"], str(EACH), str(uploads), str(RAMP_S), how),
        stdout=asyncio.subprocess.PIPE,
    )


async def beside_quick_ones(deployment):
    """What `ask` finds beside as many readers that read at once, and nobody who sends slowly."""
    quick = await crowd(deployment, "quick", 0)
    waited_s, failed = await ask(deployment)
    with contextlib.suppress(ProcessLookupError):  # it may have read everything and ended
        quick.terminate()
    await quick.communicate()
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 30)
    assert not failed
    return waited_s


async def test_a_crowd_of_slow_clients(deployment, record_property):
    """What the others notice of it is what they would not notice of quick clients that ask the same.

    The readers' key may have two requests under way; what more it were given would be load, read or not.
    Others are measured for sixty seconds from the first connection of the crowd: thirty in which it connects,
    and thirty in which all are held at first and then left.
    """
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 30)
    before_s = await beside_quick_ones(deployment)
    slow = await crowd(deployment, "slow", EACH)
    beside_s, failed = await ask(deployment)
    closed = json.loads((await slow.communicate())[0])
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 30)
    after_s = await beside_quick_ones(deployment)
    arms = {"quick": before_s, "slow": beside_s, "quick again": after_s}
    ages_s = {kind: [age_s for age_s in ages if age_s is not None] for kind, ages in closed.items()}
    ramp = int(RAMP_S / EVERY_S)
    record_property("p95_s", {name: p95(one) for name, one in arms.items()})
    record_property("p95_while_they_connect_s", {name: p95(one[:ramp]) for name, one in arms.items()})
    record_property("p95_then_s", {name: p95(one[ramp:]) for name, one in arms.items()})
    record_property("oldest_s", {kind: max(ages) for kind, ages in ages_s.items()})
    record_property("open", {kind: ages.count(None) for kind, ages in closed.items()})
    assert not failed
    assert {kind: len(ages) for kind, ages in ages_s.items()} == {"readers": EACH, "uploads": EACH}
    assert max(map(max, ages_s.values())) <= 60
    assert p95(beside_s) <= 1.1 * max(p95(before_s), p95(after_s))
