"""Preemption in a stock vLLM engine on one GPU, without Ray: one process for each arm, one after the other.

Three parts. `urgent`: a short prompt arrives while a long one is computed. `idle`: what boundaries cost that
never stop, in pairs on one engine. `load`: two minutes of FlowPrefill's mix at each rate. The weights are
dummies of Llama-3-8B's shape. Each part is written as soon as it is measured.

    python -m benchmarks.gpu.engine                                   # all arms and parts
    python -m benchmarks.gpu.engine --arm slackserve --part urgent    # one of each
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.device import Device
from benchmarks.gpu.governed_engine import EngineArm, GovernedEngine, governed_engine, write_model
from benchmarks.harness.in_turn import in_turn
from benchmarks.harness.offline_engine import in_own_process
from benchmarks.report import Measurements, overhead, print_rows, summary_ms
from prefill_node.engine_setup import EngineSetup
from prefill_node.worker.boundary import BoundaryLevel
from simulator.cost.operators import LLAMA_3_8B, ModelShape
from simulator.study.presets import qwen_trace_like
from simulator.workload.arrivals import Arrival
from slo.preemption.types import LAUNCH_AHEAD_S, STOP_WITHIN_S
from slo.queue.batching import STEP_TOKENS
from telemetry.catalogue import (
    PREEMPTION_ORDER_TO_STOP,
    PREEMPTION_RESUME_OVERHEAD,
    PREEMPTION_STOP_TO_SERVICE,
    PREEMPTIONS,
)

URGENT_P99_MS: Final = 8.0
IDLE_OVERHEAD: Final = 0.005
LLAMA_3_8B_OBJECTIVES_S: Final = (0.25, 0.5, 4.0, 6.0)
"""For the first token of text, image, search and file (FlowPrefill, arXiv 2602.16603)."""
FINEST: Final = list(BoundaryLevel)[-1].value
PARTS: Final = ("urgent", "idle", "load")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What is measured.

    Attributes:
        longest: Longest prompt.
        tokens: Length of the prompt that is computed when an urgent one arrives.
        urgent_ttft: The urgent prompt's objective, in times of what it takes alone. Nothing is stopped for a
            prompt that can wait, so a looser one is met later.
        chunk_tokens: Of chunked prefill.
        length_scale: Factor on the prompts of the load.
        objective_scale: Factor on its objectives.
        grace_s: How long the load's last requests are waited for.
    """

    shape: ModelShape = LLAMA_3_8B
    vocabulary: int = 128_256
    longest: int = 32_768
    warm_up_tokens: tuple[int, ...] = (64, 512, 2048, 8192, 16_384)
    tokens: int = 8192
    urgent_tokens: int = 64
    urgent_ttft: float = 2.0
    repeats: int = 100
    pairs: int = 40
    chunk_tokens: int = 2048
    rates_rps: tuple[float, ...] = (12.0, 24.0)
    seconds: float = 120.0
    length_scale: float = 1.0
    objective_scale: float = 1.0
    grace_s: float = 10.0


FULL: Final = EnginePlan()
ARMS: Final = {
    arm.name: arm
    for arm in (
        EngineArm("stock", is_compiled=True, as_shipped=True),
        EngineArm("fcfs"),
        EngineArm("chunked", FULL.chunk_tokens),
        EngineArm("slackserve", STEP_TOKENS, is_ours=True),
        EngineArm("graphs", STEP_TOKENS, is_ours=True, in_graphs=True),
        EngineArm("compiled", STEP_TOKENS, is_ours=True, is_compiled=True),
    )
}
"""`stock` is vLLM as it is shipped, `compiled` SlackServe with passes that vLLM has compiled.

In `graphs` its eager passes are in CUDA graphs where they are short."""
TINY: Final = replace(
    FULL,
    shape=ModelShape(layers=8, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32),
    vocabulary=256,
    longest=2048,
    warm_up_tokens=(16, 512, 1536),
    tokens=1536,
    urgent_tokens=16,
    urgent_ttft=4.0,
    repeats=6,
    pairs=2,
    chunk_tokens=256,
    rates_rps=(8.0,),
    seconds=2.0,
    length_scale=0.05,
    objective_scale=4.0,
    grace_s=5.0,
)


async def urgent(running: GovernedEngine, plan: EnginePlan, rng: random.Random) -> dict[str, Any]:
    """First tokens of a short prompt, alone and during a long prefill."""
    alone = [await running.prefill(plan.urgent_tokens) for _ in range(plan.repeats)]
    victim_s = statistics.median([await running.prefill(plan.tokens) for _ in range(3)])
    before = _counted(running)
    objective_s = plan.urgent_ttft * statistics.median(alone)
    during, victims = [], []
    for _ in range(plan.repeats):
        victim = asyncio.create_task(running.prefill(plan.tokens))
        await asyncio.sleep(rng.uniform(0.05, 0.9) * victim_s)
        during.append(await running.prefill(plan.urgent_tokens, objective_s))
        victims.append(await victim)
    preemptions, stops = _counted(running) - before, running.tally.values
    return {
        "arm": running.arm.name,
        "tokens": plan.tokens,
        "urgent_tokens": plan.urgent_tokens,
        "objective_ms": objective_s * 1e3,
        "victim_alone_ms": victim_s * 1e3,
        "alone_ms": summary_ms(alone),
        "during_ms": summary_ms(during),
        "added_p99_ms": summary_ms(during)["p99"] - summary_ms(alone)["p99"],
        "victim_ms": summary_ms(victims),
        "preemptions": preemptions,
        "order_to_stop_ms": summary_ms(stops[PREEMPTION_ORDER_TO_STOP.name]),
        "stop_to_service_ms": summary_ms(stops[PREEMPTION_STOP_TO_SERVICE.name]),
        "resume_overhead_ms": summary_ms(stops[PREEMPTION_RESUME_OVERHEAD.name]),
    }


async def idle(running: GovernedEngine, plan: EnginePlan) -> dict[str, Any]:
    """The long prompt with and without boundaries on one engine, in pairs, in alternating order."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(plan.pairs + 1):
        for on in (True, False) if number % 2 else (False, True):
            await running.engine.collective_rpc("with_boundaries", args=(on,))
            seconds = await running.prefill(plan.tokens)
            if number:
                times[on].append(seconds)
    await running.engine.collective_rpc("with_boundaries", args=(True,))
    return {
        "arm": running.arm.name,
        "tokens": plan.tokens,
        "pairs": len(times[True]),
        "without_ms": statistics.median(times[False]) * 1e3,
        "with_ms": statistics.median(times[True]) * 1e3,
        **overhead(times[True], times[False]),
    }


async def load(running: GovernedEngine, plan: EnginePlan, rate_rps: float, seed: int) -> dict[str, Any]:
    """A stream of FlowPrefill's mix at a rate: who had the first token in time."""
    mix = qwen_trace_like([objective * plan.objective_scale for objective in LLAMA_3_8B_OBJECTIVES_S])
    arrivals = mix.stream(rate_rps, max(1, round(rate_rps * plan.seconds)), seed)
    before, started_s = _counted(running), time.monotonic()
    tasks = [asyncio.create_task(_arrive(running, plan, arrival, started_s)) for arrival in arrivals]
    await asyncio.wait(tasks, timeout=arrivals[-1].at_s + plan.grace_s)
    ttfts = [task.result() if task.done() else None for task in tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pairs = list(zip(arrivals, ttfts, strict=True))
    kinds = sorted({arrival.kind for arrival in arrivals})
    return {
        "arm": running.arm.name,
        "rate_rps": rate_rps,
        "seed": seed,
        "seconds": plan.seconds,
        "requests": len(arrivals),
        "on_time": _on_time(pairs),
        "on_time_by_kind": {
            kind: _on_time([pair for pair in pairs if pair[0].kind == kind]) for kind in kinds
        },
        "unfinished": sum(ttft is None for ttft in ttfts),
        "ttft_ms": summary_ms([ttft for ttft in ttfts if ttft is not None]),
        "preemptions": _counted(running) - before,
    }


async def _arrive(running: GovernedEngine, plan: EnginePlan, arrival: Arrival, started_s: float) -> float:
    await asyncio.sleep(started_s + arrival.at_s - time.monotonic())
    tokens = min(max(1, round(arrival.tokens * plan.length_scale)), plan.longest - 1)
    return await running.prefill(tokens, arrival.ttft_s)


def _on_time(pairs: Sequence[tuple[Arrival, float | None]]) -> float:
    met = sum(ttft is not None and ttft <= (arrival.ttft_s or float("inf")) for arrival, ttft in pairs)
    return met / len(pairs)


def _counted(running: GovernedEngine) -> float:
    """Stops so far."""
    running.collect()
    return sum(value for name, value in running.tally.counts.items() if name.startswith(PREEMPTIONS.name))


async def measure(
    name: str, parts: Sequence[str], plan: EnginePlan, setup: EngineSetup, out: Path, seed: int
) -> Measurements:
    """All parts of one arm; results are in `engine-ARM.json`."""
    import vllm

    device = Device.found()
    about = {"device": device.about(), "seed": seed, "arm": name, "vllm": vllm.__version__}
    arm = ARMS[name]
    setup = replace(setup, compiled=arm.is_compiled)
    if name == "chunked":
        arm = replace(arm, chunk_tokens=plan.chunk_tokens)
    findings = Measurements(out / f"engine-{name}.json", about | {"setup": asdict(setup)})
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory), plan.shape, plan.vocabulary, plan.longest)
        async with governed_engine(arm, model, setup, plan.warm_up_tokens, seed=seed) as running:
            findings.add(
                "engine",
                {
                    **running.about(),
                    "governed": running.is_governed,
                    "granularity": running.granularity,
                    "per_token_ms": running.predictor.per_token_s * 1e3,
                    "fixed_ms": running.predictor.fixed_s * 1e3,
                },
            )
            rng = random.Random(f"{seed} urgent")
            if "urgent" in parts:
                findings.add("urgent", await urgent(running, plan, rng))
            if "idle" in parts and arm.is_ours:
                findings.add("idle", await idle(running, plan))
            if "load" in parts:
                for rate_rps in plan.rates_rps:
                    findings.add("load", await load(running, plan, rate_rps, seed))
            if arm.is_ours and not running.is_governed:
                raise RuntimeError(
                    "the governor has failed; what was measured after that is without preemption"
                )
    show(findings)
    return findings


def show(findings: Measurements) -> None:
    """What was measured, as tables."""
    found = findings.results
    print(f"\n{findings.about['arm']}: vLLM {findings.about['vllm']}, {found['engine'][0]}")
    is_gpu = findings.about["device"]["is_gpu"]
    for row in found.get("urgent", []):
        met = _verdict(row["added_p99_ms"] <= URGENT_P99_MS, is_gpu=is_gpu)
        times = [{"time": key, **row[key]} for key in ("alone_ms", "during_ms", "order_to_stop_ms")]
        print_rows(f"{row['urgent_tokens']} tokens during {row['tokens']}, ms", times)
        print(
            f"added at p99: {row['added_p99_ms']:+.2f} ms, target +{URGENT_P99_MS:g} ms: {met}; "
            f"{row['preemptions']:.0f} stops in {row['during_ms']['count']} tries"
        )
    for row in found.get("idle", []):
        met = _verdict(row["overhead"] <= IDLE_OVERHEAD, is_gpu=is_gpu)
        print(f"idle overhead {row['overhead']:+.2%} of {row['without_ms']:.1f} ms, target 0.5 %: {met}")
    for row in found.get("load", []):
        print(
            f"{row['rate_rps']:g} requests/s: {row['on_time']:.1%} in time, {row['preemptions']:.0f} stops, "
            f"{row['unfinished']} unfinished of {row['requests']}"
        )


def _verdict(reached: bool, *, is_gpu: bool) -> str:  # noqa: FBT001 - a word for a truth
    if not is_gpu:
        return "no GPU, says nothing"
    return "met" if reached else "MISSED"


def main() -> None:
    """Measure one arm here, or each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=[*ARMS], action="append", help="may be repeated; all by default")
    parser.add_argument("--part", choices=PARTS, action="append", help="likewise")
    parser.add_argument("--rate", type=float, action="append", help="requests per second, likewise")
    parser.add_argument("--seconds", type=float, help="of load at each rate")
    parser.add_argument(
        "--granularity", default=FINEST, help=f"where our passes can stop, by default {FINEST}"
    )
    parser.add_argument("--launch-ahead-ms", type=float, default=LAUNCH_AHEAD_S * 1e3)
    parser.add_argument("--tiny", action="store_true", help="a small model; its times say nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    arguments = parser.parse_args()
    arms, parts = arguments.arm or [*ARMS], arguments.part or PARTS
    plan = TINY if arguments.tiny else FULL
    if arguments.rate:
        plan = replace(plan, rates_rps=tuple(arguments.rate))
    if arguments.seconds:
        plan = replace(plan, seconds=arguments.seconds)
    setup = EngineSetup(
        mode="resume",
        granularity=arguments.granularity,
        launch_ahead_s=arguments.launch_ahead_ms / 1e3,
        stop_within_s=STOP_WITHIN_S if Device.found().is_gpu else math.inf,
    )
    asked = (parts, plan, setup, arguments.out, arguments.seed)
    if len(arms) == 1:
        print(_run(arms[0], *asked))
        return
    in_turn(arms, lambda arm: print(in_own_process(_run, arm, *asked)))


def _run(name: str, *asked: Any) -> Path:
    return asyncio.run(measure(name, *asked)).path


if __name__ == "__main__":
    main()
