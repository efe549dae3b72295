"""The requests of `comparison.py`: what is asked, warming up, a server's capacity, and one run at a rate."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.comparison.arms import RunningServer, ServerArm
from benchmarks.harness.local_server import logged
from deployments.bench.answer import Offered
from deployments.bench.client import connected
from deployments.bench.load import Asking, Prompts, offer
from deployments.bench.score import score
from simulator.workload.arrivals import Arrival, Kind, Mix
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
class ArmRun:
    """One arm in one round at one load, a fraction of the capacity: attainment by kind, and what else was."""

    arm: str
    round: int
    load: float
    offered_tokens_ps: float
    requests: dict[str, int]
    urgent: float
    long: float
    overall: float
    ttft_ms: dict[str, dict[str, float]]
    tpot_ms: dict[str, dict[str, float]]
    prompt_tokens_ps: float
    wall_s: float
    preemptions: int
    refused: dict[str, int]
    failed: dict[str, int]
    late_ms: dict[str, float]


def mix(urgent_ms: float, long_ms: float) -> Mix:
    """Urgent short prompts among long ones."""
    kind = partial(Kind, mean_tokens=0, output_tokens=OUTPUT_TOKENS, is_uniform=True)
    urgent = kind(URGENT_SHARE, ttft_s=urgent_ms / 1e3, tier=PREMIUM, range_tokens=URGENT_TOKENS)
    long = kind(1 - URGENT_SHARE, ttft_s=long_ms / 1e3, tier=STANDARD, range_tokens=LONG_TOKENS)
    return Mix({"urgent": urgent, "long": long})


def mean_tokens(of: Mix) -> float:
    """Of a prompt of the mix."""
    return statistics.fmean(arrival.tokens for arrival in of.stream(1.0, 20_000, SEED))


def ask(arm: ServerArm, server: RunningServer, arrivals: list[Arrival]) -> Offered:
    """Offer a stream of requests."""

    async def asked() -> Offered:
        async with connected(server.url, None, _TIMEOUT_S) as target:
            models = await target.models()
            assert models
            asking = PrioritisedAsking if arm.is_prioritised else Asking
            return await offer(target, arrivals, asking(models[0], Prompts(VOCABULARY)))

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
        request = Arrival(0, 0.0, "alone", tokens, output_tokens, 600.0, PREMIUM)
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


def offered(of: Mix, tokens_ps: float, seconds: float, seed: int) -> list[Arrival]:
    """About `seconds` of the mix, its time stretched so that exactly `tokens_ps` prompt tokens arrive in it.

    A short stream may by chance have few of the long prompts that are most of the work.
    """
    rate_rps = tokens_ps / mean_tokens(of)
    arrivals = of.stream(rate_rps, max(1, round(rate_rps * seconds)), seed)
    window_s = sum(arrival.tokens for arrival in arrivals) / tokens_ps
    stretch = window_s * rate_rps / len(arrivals)
    return [replace(arrival, at_s=arrival.at_s * stretch) for arrival in arrivals]


def run_at(
    arm: ServerArm, server: RunningServer, arrivals: list[Arrival], number: int, load: float, tokens_ps: float
) -> ArmRun:
    """One run in a round, at a load, which is so many prompt tokens per second."""
    server.new_log()
    result = score(ask(arm, server, arrivals))
    overall, kinds = result.overall, result.kinds
    in_time = {name: kinds[name].attainment if name in kinds else 1.0 for name in ("urgent", "long")}
    return ArmRun(
        arm=arm.name,
        round=number,
        load=load,
        offered_tokens_ps=tokens_ps,
        requests={name: kinds[name].requests if name in kinds else 0 for name in in_time},
        **in_time,
        overall=overall.attainment,
        ttft_ms={name: dict(part.ttft_ms) for name, part in kinds.items()},
        tpot_ms={name: dict(part.tpot_ms) for name, part in kinds.items()},
        prompt_tokens_ps=overall.prompt_tokens_ps,
        wall_s=result.wall_s,
        preemptions=len(logged(server.new_log(), "prefill_stopped", "stop_ms")),
        refused=dict(overall.refused),
        failed=dict(overall.failed),
        late_ms=dict(result.late_ms),
    )
