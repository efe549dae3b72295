"""Streams with a tight, a looser and no TPOT objective on one decode engine, in virtual time.

Llama 3 8B on one A100 with ample memory, objectives of 30 and 80 ms, three tiers in bursts at several rates,
first tokens from the prefill tier: caps on the batch, and the rule, whose predictions are learned from steps
with noise. Then the arms of `benchmarks.engines.decode.pace` on engines with the step times of its rounds,
beside what it measured, and on one whose speed drifts, as that of a machine does which others share. Prints
tables and writes results/cores/paced.json:

    python -m benchmarks.cores.decode.paced
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Final

from benchmarks.cores import pool_pressure
from benchmarks.engines.decode import pace, stepped_run
from benchmarks.harness.bursts import bursty
from benchmarks.report import print_rows, result, write
from simulator.cost.decode_steps import DecodeModel
from simulator.pressure.decoding import PressedRequest, PressedStream
from simulator.pressure.engine import PressedEngine, PressedSetup, Way
from simulator.pressure.in_pace import InPace
from simulator.pressure.ours import Ours
from simulator.pressure.ways import ByPriority, FirstCome
from slo.tiers import DEFAULT_TIERS, Tier

SEEDS: Final = range(41, 45)
RATES_RPS: Final = (10.0, 14.0, 18.0)
KINDS: Final = {
    "premium": (0.3, (200, 1500), 100, 0.030),
    "standard": (0.4, (500, 3000), 250, 0.080),
    "background": (0.3, (500, 3000), 600, None),
}
"""Part of all requests, prompts from and to, median answer, TPOT objective in seconds."""
CAPS: Final = (64, 96, 128, 192)
MOVED_S: Final = 5e-5
"""Seconds for each stream that the batch gains or loses; as much as a measured engine on two cores takes."""
NOISE: Final = 0.1
SECONDS: Final = 60.0
MEASURED: Final = "engines/decode_pace_heavy"
DRIFTING: Final = (
    (8.0, 1.0, 0.0),
    (8.0, 1.0, 0.15),
    (8.0, 1.0, 0.25),
    (12.0, 1.0, 0.0),
    (12.0, 1.0, 0.15),
    (12.0, 1.0, 0.25),
    (12.0, 1.15, 0.15),
    (12.0, 1.3, 0.15),
)
"""Requests a second; how many times as long steps take as when objectives were set; drift of the speed."""
DRIFTING_SEEDS: Final = range(500, 506)
FIXED_S, STREAM_S, PROMPT_TOKEN_S = 2.3e-3, 1.5e-4, 3e-5
"""About what a step of the measured engine takes, each of its streams, and a token of a prompt."""
_RULE: Final = "the rule"
_WAYS: Final[Mapping[str, Callable[[], Way]]] = {
    "vLLM": FirstCome,
    "no rule": partial(Ours, DEFAULT_TIERS),
    _RULE: partial(InPace, DEFAULT_TIERS),
}
DRIFTING_ARMS: Final = (*(f"priorities, cap {seqs}" for seqs in pace.CAPS), "no rule", _RULE)
_CAPPED: Final = re.compile(r"(?P<priorities>priorities, )?cap (?P<seqs>\d+)")


def arrivals(rate_rps: float, seed: int) -> list[PressedRequest]:
    """Requests in bursts and lulls, whose first token has come."""
    rng = Random(seed)
    found: list[PressedRequest] = []
    for now_s in bursty(rng, rate_rps, SECONDS, pool_pressure.LULL, pool_pressure.BURST):
        tier = rng.choices([*KINDS], [kind[0] for kind in KINDS.values()])[0]
        _, prompt, median, tpot_s = KINDS[tier]
        answer = max(2, min(pool_pressure.MOST, round(median * rng.lognormvariate(0.0, 0.7))))
        found.append(
            PressedRequest(
                f"{tier}-{len(found)}",
                Tier(tier),
                now_s,
                rng.randint(*prompt),
                answer,
                pool_pressure.MOST,
                tpot_s=tpot_s,
                has_first=True,
            )
        )
    return found


def served(arm: str, asked: Sequence[PressedRequest], setup: PressedSetup) -> dict[str, Any]:
    """One run."""
    if capped := _CAPPED.fullmatch(arm):
        setup = replace(setup, max_seqs=int(capped["seqs"]))
    way = _WAYS[arm]() if arm in _WAYS else (ByPriority() if capped and capped["priorities"] else FirstCome())
    engine = PressedEngine(setup, way, DEFAULT_TIERS)
    engine.run(asked)
    return outcome(engine.done, engine.now_s)


def outcome(done: Sequence[PressedStream], took_s: float) -> dict[str, Any]:
    """What came of it, named as the measured rounds name it."""
    row: dict[str, Any] = {}
    for tier in KINDS:
        ours = [one for one in done if one.asked.tier == tier]
        row[f"{tier} in pace"] = statistics.fmean(
            one.tpot_s <= (one.asked.tpot_s or math.inf) for one in ours
        )
        row[f"{tier} met"] = statistics.fmean(one.is_met for one in ours)
        row[f"{tier} end p50 s"] = statistics.median(one.token_s[-1] - one.asked.at_s for one in ours)
    gaps = (gap for one in done for gap in one.gaps_s)
    return row | {"gap max s": max(gaps), "tokens/s": sum(one.emitted for one in done) / took_s}


def on_a100() -> list[dict[str, Any]]:
    """Each rate and arm, the mean of the seeds."""
    capped = [f"{kind}cap {seqs}" for seqs in CAPS for kind in ("", "priorities, ")]
    setup = replace(
        pool_pressure.on_a100(1 << 20, has_host=False), moved_s=MOVED_S, noise=NOISE, max_seqs=1024
    )
    rows = []
    for rate_rps in RATES_RPS:
        for arm in ("vLLM", *capped, "no rule", _RULE):
            runs = [served(arm, arrivals(rate_rps, seed), replace(setup, seed=seed)) for seed in SEEDS]
            rows.append(
                {
                    "rate": rate_rps,
                    "arm": arm,
                    **stepped_run.mean([{"arm": arm, **run} for run in runs], "arm"),
                }
            )
    return rows


def beside_the_measured() -> list[dict[str, Any]]:
    """Each measured arm, the mean of its rounds, and the same simulated with the step times of each."""
    real = result(MEASURED)
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in real["rounds"]):
        measured = [row for row in real["rounds"] if row["arm"] == arm]
        simulated = [served(arm, *_of_round(real["settings"], row)) for row in measured]
        row: dict[str, Any] = {"arm": arm}
        for key in simulated[0]:
            row[key] = statistics.fmean(one[key] for one in measured)
            row[f"{key}, simulated"] = statistics.fmean(one[key] for one in simulated)
        rows.append(row)
    return rows


def _of_round(given: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[list[PressedRequest], PressedSetup]:
    """The requests of a measured round, and an engine with its step times."""
    kinds = pace.kinds(given["alone ms"] / 1e3)
    asked = pace.offered(given["seconds"], given["rate"], given["seed"] + row["round"], kinds)
    setup = _engine(*(max(0.0, row[key]) for key in stepped_run.STEP_TIMES))
    return pool_pressure.pressed(asked, kinds), setup


def _engine(fixed_s: float, stream_s: float, prompt_token_s: float) -> PressedSetup:
    """One as it is measured."""
    return PressedSetup(
        DecodeModel(0.0, stream_s, 0.0, fixed_s, 1 << 60),
        prompt_token_s,
        1 << 20,
        block_tokens=stepped_run.BLOCK,
        chunk_tokens=128,
        step_tokens=1024,
        moved_s=MOVED_S,
        noise=NOISE,
    )


def while_it_drifts() -> list[dict[str, Any]]:
    """Each case and arm, the mean of the seeds."""
    kinds = pace.kinds(FIXED_S + STREAM_S)
    rows = []
    for rate_rps, slower, drift in DRIFTING:
        setup = _engine(slower * FIXED_S, slower * STREAM_S, slower * PROMPT_TOKEN_S)
        for arm in DRIFTING_ARMS:
            runs = []
            for seed in DRIFTING_SEEDS:
                asked = pool_pressure.pressed(pace.offered(25, rate_rps, seed, kinds), kinds)
                runs.append({"arm": arm, **served(arm, asked, replace(setup, drift=drift, seed=seed))})
            case = {"rate": rate_rps, "slower": slower, "drift": drift}
            rows.append({**case, "arm": arm, **stepped_run.mean(runs, "arm")})
    return rows


def main() -> None:
    """Simulate everything."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = on_a100()
    for rate_rps in RATES_RPS:
        print_rows(f"{rate_rps:g} requests/s", [row for row in rows if row["rate"] == rate_rps])
    measured = beside_the_measured()
    print_rows("beside the measured engine", measured)
    drifting = while_it_drifts()
    print_rows("while the machine's speed drifts", drifting)
    settings = {
        "seeds": [*SEEDS],
        "seconds": SECONDS,
        "kinds": KINDS,
        "moved_s": MOVED_S,
        "noise": NOISE,
        "measured": MEASURED,
        "drifting_seeds": [*DRIFTING_SEEDS],
        "step_s": [FIXED_S, STREAM_S, PROMPT_TOKEN_S],
    }
    found = {"a100": rows, "beside": measured, "drifting": drifting}
    print(write("cores/paced", settings | found))


if __name__ == "__main__":
    main()
