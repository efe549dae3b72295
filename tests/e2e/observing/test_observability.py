"""A real Prometheus scrapes a real deployment under mixed load: what the rules and dashboards make of it."""

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dashboards import filled
from prometheus import needs_prometheus, scraping
from waiting import assert_soon, at_rest

from observability.boards import BOARDS
from observability.promql import exported
from telemetry import catalogue
from telemetry.pressure import PRESSURE_METRICS

pytestmark = [pytest.mark.e2e, needs_prometheus]

RULES = Path(__file__).parents[3] / "observability" / "rules"
ROUNDS = 12
SILENT = {
    exported(metric): reason
    for metric, reason in (
        (catalogue.ROUTER_FALLBACKS, "the router answers"),
        (catalogue.REPLACEMENTS, "no prefill fails"),
        (catalogue.VOTES, "one rank votes with nobody"),
        (catalogue.DROPPED_EVENTS, "the replica reads its engine's events in time"),
        (catalogue.DIRECTED, "one replica's governor needs no help"),
        (catalogue.DIRECTIVES, "one replica's governor needs no help"),
        (catalogue.WORK_WASTED, "stopped prefills keep their work"),
        (catalogue.POLICY_CHANGES, "the tests' deployment sheds nothing"),
        (catalogue.FIRST_TOKENS_RESAMPLED, "no answer is constrained"),
        (catalogue.ENGINES_ENDED, "no engine ends"),
        (catalogue.CONTINUATIONS, "no decode replica fails"),
        (catalogue.PREEMPTION_REFUSALS, "the governor may have had nothing to refuse"),
        *((metric, "pressure.enabled is off") for metric in PRESSURE_METRICS),
    )
} | {
    "ray_vllm_num_preemptions_total": "memory suffices",
    'ray_slackserve_prompt_length_error_ratio_bucket{sign="positive"}': "all prompts may be underestimated",
}
"""What may have no series here, and why."""


@pytest.fixture
def prometheus(deployment, tmp_path):
    monitor_port = (
        deployment.monitor_port or json.loads(deployment.top("--json").stdout)["monitor"]["metrics_port"]
    )
    ports = [deployment.metrics_port(), monitor_port]
    rules = [RULES / "recording.yaml", RULES / "alerts.yaml"]
    with scraping(tmp_path, ports, rules) as running:
        assert_soon(lambda: len(running.query("up == 1")) == 2, 60, "Prometheus does not scrape both")
        yield running


class Clients:
    """Ask for completions in several ways."""

    def __init__(self, deployment):
        self._http = deployment.http()

    async def ask(self, prompt, tier, ttft_ms=None, **fields):
        """Status of the answer."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "stream": True}
        headers = {"x-slo-tier": tier} | ({} if ttft_ms is None else {"x-slo-ttft-ms": f"{ttft_ms:.0f}"})
        answer = await self._http.post("/v1/completions", json=body | fields, headers=headers)
        await answer.aread()
        return answer.status_code

    async def leave(self):
        """Leave before anything is due."""
        async with asyncio.timeout(0.05):
            await self.ask(tokens(3000), "background")


def tokens(count):
    return random.choices(range(200), k=count)


async def seconds(work):
    started_s = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - started_s


async def mixed_load(clients, enough):
    """Long prompts that are stopped for urgent ones, texts, refusals, and clients that leave.

    It ends after `ROUNDS`, or when there is `enough` to see.
    """
    await clients.ask(tokens(3900), "background")  # the first one touches the memory
    long_s = await seconds(clients.ask(tokens(3900), "background"))
    alone_s = await seconds(clients.ask(tokens(64), "premium"))
    for number in range(ROUNDS):
        if enough.is_set():
            break
        running = asyncio.create_task(clients.ask(tokens(3900), "background"))
        await asyncio.sleep(long_s / 5)
        await clients.ask(tokens(64), "premium", (alone_s + long_s / 2) * 1e3)
        await running
        # The length of the one is underestimated, that of the other is not.
        await clients.ask("a" if number % 2 else "A text of some length. " * 20, "standard")
        await clients.ask("late", "premium", 1)
        await clients.ask(tokens(40), "standard", n=2)
        await clients.ask("no such model", "standard", model="tinny")
        with pytest.raises(TimeoutError):
            await clients.leave()


def timeline(path):
    """What `slackserve timeline` writes of the last ten minutes."""
    command = [sys.executable, "-m", "deployments.cli", "timeline", "--last", "10m", "--out", str(path)]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert drawn.returncode == 0, drawn.stderr
    return path.read_text()


def judged(prometheus, tier, met):
    counted = prometheus.query(
        f'sum(slackserve_slo_judged_total{{tier="{tier}",objective="all",met="{met}"}})'
    )
    return float(counted[0]["value"][1])


def kept_stops(deployment):
    return deployment.metric("slackserve_preemptions_total", outcome="kept")


def surprises(expressions):
    """Those that should have a series here."""
    return [expr for expr in expressions if not any(name in expr for name in SILENT)]


async def ask(prometheus, expr):
    return await asyncio.to_thread(prometheus.query, filled(expr))


async def test_what_operators_see(deployment, prometheus, tmp_path):
    clients = Clients(deployment)
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 30)

    await asyncio.to_thread(assert_soon, lambda: prometheus.query(exported(catalogue.SLO_JUDGED)), 30)
    before = judged(prometheus, "standard", "no")
    refusals = [await clients.ask(tokens(1000), "standard", 1) for _ in range(5)]
    assert refusals == [429] * 5
    await asyncio.to_thread(
        assert_soon,
        lambda: judged(prometheus, "standard", "no") == before + 5,
        10,
        "refusals do not count in the indicator",
    )

    enough, kept_before = asyncio.Event(), kept_stops(deployment)
    load = asyncio.create_task(mixed_load(clients, enough))
    unanswered = {expr for board in BOARDS for expr in board.expressions()}
    while not load.done():  # Ray forgets a gauge that is not set again, so not afterwards
        unanswered -= {expr for expr in unanswered if await ask(prometheus, expr)}
        if not surprises(unanswered) and await asyncio.to_thread(kept_stops, deployment) >= kept_before + 5:
            enough.set()
        await asyncio.sleep(1)
    await load
    surprising = surprises(unanswered)
    for _ in range(5):  # what came with the last requests has not been scraped twice yet
        surprising = [expr for expr in surprising if not await ask(prometheus, expr)]
        if not surprising:
            break
        await asyncio.sleep(1)
    assert not surprising, "no data:\n" + "\n".join(surprising)
    assert prometheus.query("sum(ray_slackserve_preemptions_total{outcome='kept'}) >= 4")
    (left,) = prometheus.query('slackserve:slo_budget_left:ratio30d{tier="standard"}')
    assert float(left["value"][1]) < 1
    firing = {each["metric"]["alertname"] for each in prometheus.query("ALERTS{alertstate='firing'}")}
    assert not firing & {"SlackServeSliAbsent", "SlackServeMonitorLost", "SlackServePreemptionUnavailable"}

    page = await asyncio.to_thread(timeline, tmp_path / "timeline.html")
    made_way = r'<th scope="row">background, 3,900 tokens</th><td>premium, 64 tokens</td>'
    assert len(re.findall(made_way, page)) >= 4
    assert "data:image/svg+xml" in page
