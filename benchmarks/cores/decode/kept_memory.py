"""For how much of what is predicted to come of answers a decode engine keeps memory, in virtual time.

The rules of `slo.decode` with other parts than `slo.decode.output_length.KEPT_FOR`, beside vLLM's priorities
with and without a watermark: on an A100 with half of the memory that its requests hold at the fullest, and
with the step times and arrivals of a measured engine. Both also with an objective for everybody in place of
the background, and then with first tokens from the prefill tier. Prints a table and writes
results/cores/kept_memory.json:

    python -m benchmarks.cores.decode.kept_memory
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from benchmarks.cores import pool_pressure
from benchmarks.engines.decode import stepped_run
from benchmarks.report import print_rows, result, write
from simulator.pressure.decoding import PressedRequest
from simulator.pressure.engine import PressedEngine, PressedSetup, Way
from simulator.pressure.ours import Ours
from slo.decode.output_length import KEPT_FOR
from slo.tiers import BACKGROUND, DEFAULT_TIERS, STANDARD

PARTS: Final = (0.0, KEPT_FOR, 0.25, 0.5, 1.0, 1.5)
SEEDS: Final = range(31, 37)
ROUNDS: Final = range(2, 8)
POOL: Final = 0.5
PEERS: Final = ("vLLM, priorities", "vLLM, priorities, watermark 0.05")
MEASURED: Final = "engines/decode_pressure"
Streams = Sequence[tuple[Sequence[PressedRequest], PressedSetup]]


def worlds() -> Mapping[str, Streams]:
    """Requests and the engine that they meet, by name."""
    found: dict[str, list[tuple[Sequence[PressedRequest], PressedSetup]]] = {"A100": [], "measured": []}
    for seed in SEEDS:
        asked = pool_pressure.arrivals(seed)
        blocks = round(POOL * pool_pressure.fullest(asked))
        found["A100"].append((asked, pool_pressure.on_a100(blocks, has_host=False)))
    real = result(MEASURED)
    setup = pool_pressure.measured_setup(real, next(row for row in real["rounds"] if row["arm"] == "ours"))
    found["measured"] = [(pool_pressure.real_asked(real["settings"], number), setup) for number in ROUNDS]
    promised = {
        f"{name}, all promised": [(_promised(asked, name), setup) for asked, setup in streams]
        for name, streams in found.items()
    }
    begun = {
        f"{name}, begun": [
            ([replace(one, has_first=True) for one in asked], setup) for asked, setup in streams
        ]
        for name, streams in promised.items()
    }
    return found | promised | begun


def _promised(asked: Sequence[PressedRequest], name: str) -> list[PressedRequest]:
    """The same with the objectives of standard for the background."""
    kinds = pool_pressure.KINDS["standard"][3:] if name == "A100" else _standard()
    ttft_s, tpot_s = kinds
    return [
        replace(one, tier=STANDARD, ttft_s=ttft_s, tpot_s=tpot_s) if one.tier == BACKGROUND else one
        for one in asked
    ]


def _standard() -> tuple[float | None, float | None]:
    kind = stepped_run.KINDS["standard"]
    return kind.ttft_s, kind.tpot_s


def served(way: Way, asked: Sequence[PressedRequest], setup: PressedSetup) -> dict[str, Any]:
    """What comes of one run."""
    engine = PressedEngine(setup, way, DEFAULT_TIERS)
    engine.run(asked)
    done, took_s = engine.done, engine.now_s
    row: dict[str, Any] = {}
    for tier in pool_pressure.KINDS:
        of_tier = [one for one in done if one.asked.tier == tier]
        row[f"{tier} met"] = _part([one.is_met for one in of_tier if one.asked.ttft_s is not None])
        row[f"{tier} preempted"] = _part([one.preemptions > 0 for one in of_tier])
    ends = [one.token_s[-1] - one.asked.at_s for one in done if one.asked.tier == BACKGROUND]
    met = sum(one.is_met for one in done if one.asked.ttft_s is not None)
    return row | {
        "background end p50 s": statistics.median(ends) if ends else None,
        "again": engine.again / engine.computed,
        "tokens/s": sum(one.emitted for one in done) / took_s,
        "met/s": met / took_s,
    }


def _part(of: Sequence[bool]) -> float | None:
    return statistics.fmean(of) if of else None


def keeping(part: float) -> Ours:
    """Our way with another part."""
    way = Ours(DEFAULT_TIERS)
    way.lengths.factor = part
    return way


WAYS: Final[Mapping[str, Callable[[], Way]]] = {
    **{peer: pool_pressure.WAYS[peer] for peer in PEERS},
    **{f"kept for {part:g}": partial(keeping, part) for part in PARTS},
}


def main() -> None:
    """Simulate everything."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = []
    for name, streams in worlds().items():
        for label, way in WAYS.items():
            rows.append({"engine": name, "way": label, **means(way, streams)})
        print_rows(name, [row for row in rows if row["engine"] == name])
    settings = {"parts": PARTS, "seeds": [*SEEDS], "rounds": [*ROUNDS], "pool": POOL, "measured": MEASURED}
    print(write("cores/kept_memory", {**settings, "rows": rows}))


def means(way: Callable[[], Way], streams: Streams) -> dict[str, float | None]:
    """What comes of a way, over the streams."""
    runs = [served(way(), *stream) for stream in streams]
    return {key: _mean([run[key] for run in runs]) for key in runs[0]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


if __name__ == "__main__":
    main()
