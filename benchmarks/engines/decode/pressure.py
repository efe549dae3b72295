"""Decode engines that run out of KV memory: vLLM's ways of bearing it, and ours, under the same bursts.

A real engine on CPU with a tiny random model, whose steps this process takes one by one and times. Requests
of three tiers come in bursts; what each will answer is drawn and known to no scheduler, each may have 1,024
tokens. Arms take turns. The pool is a part of what an engine with ample memory holds at its fullest under
such arrivals; host memory, in the arm that has it, is a quarter of the pool. vLLM's `max_num_seqs` is tuned
for each pool with arrivals of their own, with and without priorities.

    python -m benchmarks.engines.decode.pressure [--seconds 25] [--rounds 2] [--pools 1,0.5] [--output NAME]
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.engines.decode.stepped_run import (
    AMPLE_BLOCKS,
    BACKGROUND,
    BLOCK,
    CONTEXT,
    KINDS,
    Arm,
    Asked,
    arrivals,
    mean,
    met,
    run,
    settings,
)
from benchmarks.harness.offline_engine import in_own_process
from benchmarks.harness.tiny_models import build_tiny
from benchmarks.report import print_rows, write
from kv_transfer.connector import KVRole, kv_transfer_config

TUNED_SEQS: Final = (8, 12, 18, 27)


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """One run in figures."""
    asked = found["asked"]
    row: dict[str, Any] = {}
    for tier in KINDS:
        ours = [one for one in asked if one["tier"] == tier]
        row[f"{tier} met"] = statistics.fmean(met(one, KINDS[tier]) for one in ours)
        row[f"{tier} preempted"] = statistics.fmean(one["preemptions"] > 0 for one in ours)
    gaps = sorted(gap for one in asked for gap in _gaps(one["token_s"]))
    last_s = sorted(one["token_s"][-1] - one["at_s"] for one in asked if one["tier"] == BACKGROUND)
    return row | {
        "gap p99 s": gaps[int(0.99 * len(gaps))],
        "gap max s": gaps[-1],
        "background end p50 s": last_s[len(last_s) // 2],
        "again": found["again"] / found["computed"],
        "took s": found["took_s"],
        "steps": found["steps"],
        "tokens/s": sum(one["answer"] for one in asked) / found["took_s"],
        "fullest": found["fullest"],
        **found["step_times"],
    }


def _gaps(token_s: list[float]) -> Iterator[float]:
    return (later - earlier for earlier, later in itertools.pairwise(token_s))


def arms(blocks: int, tuned: Mapping[str, int]) -> list[Arm]:
    """All that are compared on a pool."""
    ours = {"scheduler_cls": "decode_node.engine.pressure_scheduler.PressureScheduler"}
    host = {"kv_transfer_config": kv_transfer_config(KVRole.DECODE, "cpu", 30, swap_bytes=None)}
    return [
        Arm("stock", blocks, {}),
        Arm("watermark 0.05", blocks, {"watermark": 0.05}),
        Arm("priority", blocks, {"scheduling_policy": "priority"}),
        Arm("priority, watermark 0.05", blocks, {"scheduling_policy": "priority", "watermark": 0.05}),
        Arm(f"capped at {tuned['fcfs']}", blocks, {"max_num_seqs": tuned["fcfs"]}),
        Arm(
            f"priority, capped at {tuned['priority']}",
            blocks,
            {"scheduling_policy": "priority", "max_num_seqs": tuned["priority"]},
        ),
        Arm("ours", blocks, ours),
        Arm("ours, host memory", blocks, ours | host),
        Arm("ample memory", AMPLE_BLOCKS, {}),
        Arm("ours, ample memory", AMPLE_BLOCKS, ours),
    ]


def tune(model: str, blocks: int, asked: list[Asked]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The cap on streams with which premium, and then all, meet most, without priorities and with them."""
    best, rows = {}, []
    for policy in ("fcfs", "priority"):
        tried = {}
        for seqs in TUNED_SEQS:
            arm = Arm(f"{policy} {seqs}", blocks, {"scheduling_policy": policy, "max_num_seqs": seqs})
            row = summary(in_own_process(run, model, arm, asked))
            rows.append({"blocks": blocks, "policy": policy, "max_num_seqs": seqs, **row})
            tried[seqs] = (row["premium met"], row["standard met"], row["tokens/s"])
        best[policy] = max(tried, key=tried.__getitem__)
    return best, rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--rate", type=float, default=12.0, help="Requests a second, of which bursts are times."
    )
    parser.add_argument("--pools", default="1,0.5", help="Parts of what is held at the fullest.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--output", default="decode_pressure", help="Name of the result.")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    tuning, rounds, totals = [], [], Counter()
    with tempfile.TemporaryDirectory() as name:
        model = str(build_tiny(Path(name), "llama", layers=given.layers, context=CONTEXT, hidden=256))
        pilot = arrivals(given.seconds / 2, given.rate, seed=1)
        ample = in_own_process(run, model, Arm("ample memory", AMPLE_BLOCKS, {}), pilot)
        fullest = math.ceil(ample["fullest"] * AMPLE_BLOCKS)
        print(f"at the fullest {fullest} blocks of {BLOCK} tokens", summary(ample))
        for part in (float(one) for one in given.pools.split(",")):
            blocks = max(math.ceil(CONTEXT / BLOCK), round(part * fullest))
            tuned, tried = tune(model, blocks, pilot)
            tuning += tried
            for number in range(given.rounds):
                asked = arrivals(given.seconds, given.rate, seed=100 + number)
                order = arms(blocks, tuned)
                for arm in order if number % 2 == 0 else reversed(order):
                    row = summary(in_own_process(run, model, arm, asked))
                    rounds.append(
                        {"pool": part, "arm": arm.name, "round": number, "blocks": arm.blocks, **row}
                    )
                    totals[part, arm.name] += 1
                    print(rounds[-1], flush=True)
    rows = [
        mean([row for row in rounds if (row["pool"], row["arm"]) == key], "pool", "arm", "blocks")
        for key in totals
    ]
    print_rows("Means of all rounds", rows)
    results = {
        "settings": settings(given),
        "fullest_blocks": fullest,
        "tuning": tuning,
        "rounds": rounds,
        "means": rows,
    }
    print(write(f"engines/{given.output}", results))


if __name__ == "__main__":
    main()
