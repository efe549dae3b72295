"""The requests of `comparison.run`: what is asked, warming up, a server's capacity, and one run at a rate."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.comparison.arms import RunningServer, ServerArm
from benchmarks.harness.local_server import logged
from deployments.bench.answer import Answer, Offered
from deployments.bench.client import Server, connected
from deployments.bench.load import Asking, Prompts, offer
from deployments.bench.score import score
from simulator.workload.arrivals import Arrival, Kind, Mix
from slo.objectives import TIER_HEADER
from slo.tiers import DEFAULT_TIERS, PREMIUM, STANDARD

SEED = 4000
VOCABULARY = range(1000, 40000)
URGENT_SHARE = 0.75
URGENT_TOKENS = (32, 128)
LONG_TOKENS = (1500, 4000)
OUTPUT_TOKENS = 8
WARM_UP_TOKENS = (64, 4000, 1500, 64, 512, 3000, 64)
URGENT_ALONE_TOKENS = (32, 45, 64, 90, 128)
LONG_ALONE_TOKENS = (2500, 2500)
OFFERED_WITHIN = 0.02
_TIMEOUT_S = 900.0


class PrioritisedAsking(Asking):
    """Asks with vLLM's `priority` too, which only a server with that policy takes."""

    def fields(self, arrival: Arrival) -> dict[str, Any]:
        """The body of a request."""
        return {
            **super().fields(arrival),
            "priority": DEFAULT_TIERS.top_rank - DEFAULT_TIERS.rank(arrival.tier),
        }


@dataclass(frozen=True)
class Pooled:
    """A server for each tier, or one, whose name is empty, for all."""

    pools: Mapping[str, Server]

    async def complete(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """As `Server.complete`, by the tier that asks."""
        pool = self.pools.get("") or self.pools[headers[TIER_HEADER]]
        return await pool.complete(body, headers)


@dataclass(frozen=True)
class ArmRun:
    """One arm in one round at one load, a fraction of the capacity.

    Attributes:
        offered_tokens_ps: Prompt tokens per second of the arrivals as they were sent.
        met: By kind, of each request whether its first token was in time.
        ttfts_ms: By kind, of each request that got a first token the time to it.
        tpot_ms: By kind, quantiles.
        late_ms: How late requests were sent.
    """

    arm: str
    round: int
    load: float
    offered_tokens_ps: float
    met: dict[str, list[bool]]
    ttfts_ms: dict[str, list[float]]
    tpot_ms: dict[str, dict[str, float]]
    prompt_tokens_ps: float
    wall_s: float
    preemptions: int
    refused: dict[str, int]
    failed: dict[str, int]
    late_ms: dict[str, float]

    @property
    def unserved(self) -> int:
        """Requests that were refused or failed."""
        return sum(self.refused.values()) + sum(self.failed.values())

    def flags(self, kind: str | None = None) -> list[bool]:
        """Of each request of a kind, or of all, whether it was in time."""
        return [flag for name, some in self.met.items() if kind in (None, name) for flag in some]

    def attained(self, kind: str | None = None) -> float:
        """Fraction of the requests of a kind, or of all, that were in time."""
        return statistics.fmean(self.flags(kind))

    def merit(self) -> tuple[float, float, float]:
        """By which chunks are chosen; more is better."""
        times = self.ttfts_ms.get("urgent") or [math.inf]
        return self.attained(), self.attained("urgent"), -float(np.percentile(times, 90))


def mix(urgent_ms: float, long_ms: float) -> Mix:
    """Urgent short prompts among long ones."""
    kind = partial(Kind, mean_tokens=0, output_tokens=OUTPUT_TOKENS, is_uniform=True)
    urgent = kind(URGENT_SHARE, ttft_s=urgent_ms / 1e3, tier=PREMIUM, range_tokens=URGENT_TOKENS)
    long = kind(1 - URGENT_SHARE, ttft_s=long_ms / 1e3, tier=STANDARD, range_tokens=LONG_TOKENS)
    return Mix({"urgent": urgent, "long": long})


def mean_tokens(of: Mix) -> float:
    """Of a prompt of the mix."""
    return statistics.fmean(arrival.tokens for arrival in of.stream(1.0, 20_000, SEED))


def mean_output_tokens(of: Mix) -> float:
    """Of an answer."""
    return statistics.fmean(arrival.output_tokens for arrival in of.stream(1.0, 20_000, SEED))


def ask(arm: ServerArm, server: RunningServer, arrivals: list[Arrival]) -> Offered:
    """Offer a stream of requests."""

    async def asked() -> Offered:
        async with AsyncExitStack() as stack:
            pools = {
                pool: await stack.enter_async_context(connected(f"{server.url}/{pool}", None, _TIMEOUT_S))
                for pool in arm.pools or ("",)
            }
            models = await next(iter(pools.values())).models()
            assert models
            asking = (PrioritisedAsking if arm.is_prioritised else Asking)(models[0], Prompts(VOCABULARY))
            return await offer(Pooled(pools), arrivals, asking)

    return asyncio.run(asked())


def alone_ms(
    arm: ServerArm,
    server: RunningServer,
    lengths: tuple[int, ...],
    output_tokens: int = 2,
    pause_s: float = 0.0,
) -> list[float]:
    """TTFT of prompts that have the server to themselves, milliseconds.

    Args:
        arm: What is asked.
        server: Where.
        lengths: Tokens of each prompt.
        output_tokens: Tokens asked for.
        pause_s: Before each prompt; a server that has been idle is not as fast as one that has just answered.

    Raises:
        RuntimeError: when one is not answered.
    """
    times = []
    for tokens in lengths:
        time.sleep(pause_s)
        tier = PREMIUM if tokens <= max(URGENT_TOKENS) else STANDARD
        request = Arrival(0, 0.0, "alone", tokens, output_tokens, 600.0, tier)
        answer = ask(arm, server, [request]).ended[0].answer
        if answer.ttft_s is None or answer.reason:
            raise RuntimeError(f"{arm.name} did not answer a prompt of {tokens} tokens: {answer.reason}")
        times.append(answer.ttft_s * 1e3)
    return times


def warm_up(arm: ServerArm, server: RunningServer) -> dict[str, Any]:
    """Touch all memory; then what a request takes alone."""
    alone_ms(arm, server, WARM_UP_TOKENS)
    return {
        "ready_s": server.ready_s,
        "urgent_alone_ms": alone_ms(arm, server, URGENT_ALONE_TOKENS),
        "long_alone_ms": alone_ms(arm, server, LONG_ALONE_TOKENS),
    }


def burst_tokens_ps(arm: ServerArm, server: RunningServer, of: Mix, count: int) -> float:
    """Prompt tokens per second of the first `count` requests of the mix, all at once."""
    run = ask(arm, server, of.stream(1e6, count, SEED))
    got = [(item.arrival.tokens, item.answer) for item in run.ended if not item.answer.reason]
    last_s = max(answer.sent_s + answer.ttft_s for _, answer in got if answer.ttft_s is not None)
    return sum(tokens for tokens, _ in got) / (last_s - min(answer.sent_s for _, answer in got))


def offered(of: Mix, tokens_ps: float, seconds: float, seed: int) -> tuple[list[Arrival], float]:
    """About `seconds` of the mix, with its time stretched, and the seconds in which they arrive.

    In these, exactly `tokens_ps` prompt tokens arrive per second: a short stream may by chance have few of
    the long prompts that are most of the work, or come too quickly. They end when the request after the last
    would have come.

    Raises:
        RuntimeError: when they are so few that a kind is not among them.
    """
    count = max(1, round(tokens_ps / mean_tokens(of) * seconds))
    *arrivals, after = of.stream(1.0, count + 1, seed)
    if lacking := set(of.kinds) - {arrival.kind for arrival in arrivals}:
        named = " nor ".join(sorted(lacking))
        raise RuntimeError(f"no {named} requests in {seconds:g} s: give more --seconds or --pilot-seconds")
    window_s = sum(arrival.tokens for arrival in arrivals) / tokens_ps
    stretch = window_s / after.at_s
    return [replace(arrival, at_s=arrival.at_s * stretch) for arrival in arrivals], window_s


class RunPlan(NamedTuple):
    """What one run offers: about so many seconds at a load, which is so many prompt tokens per second."""

    round: int
    load: float
    tokens_ps: float
    seconds: float

    @property
    def seed(self) -> int:
        """The same for all arms."""
        return SEED + 1000 * (self.round + 1) + round(100 * self.load)


def run_at(arm: ServerArm, server: RunningServer, of: Mix, plan: RunPlan) -> ArmRun:
    """One run.

    Raises:
        RuntimeError: when what was sent is more than 2 % from what was to be.
    """
    tokens_ps = plan.tokens_ps
    arrivals, window_s = offered(of, tokens_ps, plan.seconds, plan.seed)
    server.new_log()
    run = ask(arm, server, arrivals)
    tokens = sum(arrival.tokens for arrival in arrivals)
    sent_ps = tokens / (window_s + run.ended[-1].late_s)
    if abs(sent_ps / tokens_ps - 1) > OFFERED_WITHIN:
        raise RuntimeError(f"{sent_ps:.0f} prompt tokens/s were sent to {arm.name}, not {tokens_ps:.0f}")
    result = score(run)
    overall, kinds = result.overall, result.kinds
    ended = {name: [item for item in run.ended if item.arrival.kind == name] for name in of.kinds}
    return ArmRun(
        arm=arm.name,
        round=plan.round,
        load=plan.load,
        offered_tokens_ps=sent_ps,
        met={name: [item.is_met for item in items] for name, items in ended.items()},
        ttfts_ms={
            name: [round(item.answer.ttft_s * 1e3, 1) for item in items if item.answer.ttft_s is not None]
            for name, items in ended.items()
        },
        tpot_ms={name: dict(part.tpot_ms) for name, part in kinds.items()},
        prompt_tokens_ps=overall.prompt_tokens_ps,
        wall_s=result.wall_s,
        preemptions=len(logged(server.new_log(), "prefill_stopped", "stop_ms")),
        refused=dict(overall.refused),
        failed=dict(overall.failed),
        late_ms=dict(result.late_ms),
    )
