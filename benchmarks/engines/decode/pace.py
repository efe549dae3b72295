"""Streams with a tight, a loose and no TPOT objective on one decode engine: caps on the batch, and the rule.

A real engine on CPU with ample memory and a small random model, whose steps this process takes one by one and
times. The objectives are 30, 80 and none on an accelerator on which a step of one stream takes 15 ms, scaled
to what it takes here: twice that and 5.3 times that. What it takes here is measured before the first run, so
that all arms have the same objectives. It is measured before and behind each run again; where the machine was
quicker or slower then, the run is made again, up to three times, and the steadiest counts. Requests come in
bursts, in which a step of all streams takes longer than the tight objective. Their prompts are in the
engine's prefix cache, so that, as on a decode replica, no step computes them. Arms take turns.

    python -m benchmarks.engines.decode.pace [--seconds 25] [--rounds 3] [--rate 6]
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.engines.decode.stepped_run import (
    AMPLE_BLOCKS,
    BACKGROUND,
    BLOCK,
    CONTEXT,
    PREMIUM,
    STANDARD,
    Arm,
    Asked,
    Kind,
    arrivals,
    mean,
    met,
    run,
    settings,
    tpot_of,
)
from benchmarks.harness.offline_engine import in_own_process
from benchmarks.harness.tiny_models import build_tiny
from benchmarks.report import print_rows, write

TIGHT: Final = 2.0
LOOSE: Final = 80 / 15
"""Objectives as multiples of a step of one stream."""
CAPS: Final = (6, 10, 14, 20)
STEADY: Final = 1.2
"""A step of one stream may take so many times as long beside a run as before all, or the other way round."""
FIRST: Final = 5
"""Times that it is measured before all runs; the median counts."""
TRIES: Final = 4
RULE: Final = {"scheduler_cls": "decode_node.engine.pressure_scheduler.PressureScheduler"}


def kinds(alone_s: float) -> dict[str, Kind]:
    """The streams, where a step of one takes `alone_s`."""
    return {
        PREMIUM: Kind(0.3, (32, 128), 80, 1.0, TIGHT * alone_s),
        STANDARD: Kind(0.4, (64, 256), 150, 2.0, LOOSE * alone_s),
        BACKGROUND: Kind(0.3, (64, 1024), 400, None, None),
    }


def arms() -> list[Arm]:
    """All that are compared; a cap is tried with and without vLLM's priorities."""
    capped = [
        Arm(f"{name} {cap}", AMPLE_BLOCKS, {"max_num_seqs": cap, "scheduling_policy": policy})
        for cap in CAPS
        for name, policy in (("cap", "fcfs"), ("priorities, cap", "priority"))
    ]
    return [
        Arm("vLLM", AMPLE_BLOCKS, {}),
        *capped,
        Arm("no rule", AMPLE_BLOCKS, RULE, tells_tpot=False),
        Arm("the rule", AMPLE_BLOCKS, RULE),
    ]


def offered(seconds: float, rate_rps: float, seed: int, by_tier: Mapping[str, Kind]) -> list[Asked]:
    """Requests whose prompts begin alike, but for less than a block."""
    rng = Random(seed)
    whole = [rng.randrange(250) for _ in range(CONTEXT)]
    asked = arrivals(seconds, rate_rps, seed, by_tier)
    for one in asked:
        known = BLOCK * max(1, len(one.prompt) // BLOCK)
        one.prompt = [*whole[:known], rng.randrange(250)]
    return asked


def alone_s(model: str) -> float:
    """Median time of a step of one stream, seconds."""
    asked = [Asked("premium-0", PREMIUM, 0.0, [7] * 100, 200)]
    found = in_own_process(run, model, Arm("vLLM", AMPLE_BLOCKS, {}), asked)
    token_s = found["asked"][0]["token_s"]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(token_s))


def summary(found: Mapping[str, Any], by_tier: Mapping[str, Kind]) -> dict[str, Any]:
    """One run in figures."""
    row: dict[str, Any] = {}
    promised = []
    for tier, kind in by_tier.items():
        ours = [one for one in found["asked"] if one["tier"] == tier]
        paced = [tpot_of(one) <= (kind.tpot_s or math.inf) for one in ours]
        if kind.tpot_s is not None:
            promised += paced
            over = sorted(tpot_of(one) / kind.tpot_s for one in ours)
            for part in (0.5, 0.9):
                row[f"{tier} tpot p{part * 100:.0f} over its objective"] = over[int(part * len(over))]
        row[f"{tier} in pace"] = statistics.fmean(paced)
        row[f"{tier} met"] = statistics.fmean(met(one, kind) for one in ours)
        row[f"{tier} tpot p50 ms"] = 1e3 * statistics.median(map(tpot_of, ours))
        row[f"{tier} end p50 s"] = statistics.median(one["token_s"][-1] - one["at_s"] for one in ours)
    tokens = sum(one["answer"] for one in found["asked"])
    gaps = [
        later - earlier for one in found["asked"] for earlier, later in itertools.pairwise(one["token_s"])
    ]
    row |= found["step_times"]
    return row | {
        "in pace": statistics.fmean(promised),
        "gap max s": max(gaps),
        "tokens/s": tokens / found["took_s"],
        "steps": found["steps"],
    }


def steadiness(row: Mapping[str, Any], alone_ms: float) -> float:
    """By what factor the machine was quicker or slower before or behind a run than before all."""
    beside = row["alone ms"], row["alone behind ms"]
    return max(max(one / alone_ms, alone_ms / one) for one in beside)


def steadiest(
    model: str, arm: Arm, asked: Callable[[], list[Asked]], by_tier: Mapping[str, Kind], alone_ms: float
) -> list[dict[str, Any]]:
    """Runs of an arm on the same requests, the one that counts first."""
    tries: list[dict[str, Any]] = []
    before_s = alone_s(model)
    while len(tries) < TRIES and not (tries and steadiness(tries[-1], alone_ms) <= STEADY):
        row = summary(in_own_process(run, model, arm, asked(), by_tier), by_tier)
        behind_s = alone_s(model)
        tries.append({"arm": arm.name, **row, "alone ms": 1e3 * before_s, "alone behind ms": 1e3 * behind_s})
        print(tries[-1], flush=True)
        before_s = behind_s
    return sorted(tries, key=lambda row: steadiness(row, alone_ms))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rate", type=float, default=6.0, help="Requests a second, of which bursts are times."
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--arms", nargs="*", default=[""], help="Only those whose names begin so.")
    parser.add_argument("--seed", type=int, default=200, help="Of the first round's arrivals.")
    parser.add_argument("--output", default="decode_pace", help="Name of the result.")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    rounds: list[dict[str, Any]] = []
    disturbed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        model = str(build_tiny(Path(name), "llama", layers=given.layers, context=CONTEXT, hidden=256))
        wanted = [one for one in arms() if one.name.startswith(tuple(given.arms))]
        alone = statistics.median(alone_s(model) for _ in range(FIRST))
        by_tier = kinds(alone)
        for number in range(given.rounds):
            asked = partial(offered, given.seconds, given.rate, given.seed + number, by_tier)
            for arm in wanted if number % 2 == 0 else reversed(wanted):
                counts, *others = steadiest(model, arm, asked, by_tier, 1e3 * alone)
                rounds.append({**counts, "round": number})
                disturbed += [{**one, "round": number} for one in others]
    rows = [mean([row for row in rounds if row["arm"] == arm.name], "arm") for arm in wanted]
    print_rows("Means of all rounds", rows)
    multiples = {tier: asdict(kind) for tier, kind in kinds(1.0).items()}
    told = {"steady": STEADY, "kinds": multiples, "alone ms": 1e3 * alone}
    found = {"settings": settings(given) | told, "rounds": rounds, "disturbed": disturbed, "means": rows}
    print(write(f"engines/{given.output}", found))


if __name__ == "__main__":
    main()
