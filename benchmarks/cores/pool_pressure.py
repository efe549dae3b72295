"""A decode engine whose KV memory is short, in virtual time: the ways of several servers, and ours.

Llama 3 8B on one A100, prompts from a prefill tier, three tiers in bursts; the memory is twice, once and half
of what an engine with enough of it holds at its fullest. Then the same ways under the arrivals and on an
engine with the step times of `benchmarks.engines.decode.pressure`, held against what that has measured.
Prints tables and writes results/cores/pool_pressure.json:

    python -m benchmarks.cores.pool_pressure
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final

from benchmarks.engines.decode import stepped_run
from benchmarks.harness.bursts import Phase, bursty
from benchmarks.report import print_rows, result, write
from simulator.cost.accelerators import A100, decode_model
from simulator.cost.decode_steps import DecodeModel
from simulator.cost.operators import LLAMA_3_8B
from simulator.pressure.decoding import PressedRequest, PressedStream
from simulator.pressure.engine import PressedEngine, PressedSetup, Way
from simulator.pressure.ours import Ours
from simulator.pressure.ways import (
    ByPriority,
    FirstCome,
    LeastComputed,
    NoEviction,
    Retract,
    RetractForPriority,
)
from slo.decode.victims import HostRoom, Stream, TakenBy, VictimRules
from slo.tiers import DEFAULT_TIERS, Tier

SEEDS: Final = (1, 2, 3)
SECONDS: Final = 120.0
RATE_RPS: Final = 5.0
BURST: Final = Phase(2.5, 10.0)
LULL: Final = Phase(0.4, 25.0)
POOLS: Final = (2.0, 1.0, 0.5)
KINDS: Final = {
    "premium": (0.3, (200, 1500), 100, 0.5, 0.030),
    "standard": (0.4, (500, 3000), 250, 2.0, 0.060),
    "background": (0.3, (500, 3000), 600, None, None),
}
"""Part of all requests, prompts from and to, median answer, objectives in seconds."""
MOST: Final = 2048
PROMPT_TOKEN_S: Final = 0.153 / 2048
"""Of an 8B on an A100."""
PCIE_BYTES_PS: Final = 20e9
LENGTHS: Final = (16, 64, 256, 1024, 4096, 16384)
REAL: Final = "engines/decode_pressure_minute"
ARMS: Final = {
    "stock": "vLLM",
    "watermark 0.05": "vLLM, watermark 0.05",
    "priority": "vLLM, priorities",
    "priority, watermark 0.05": "vLLM, priorities, watermark 0.05",
    "ours": "ours",
    "ours, host memory": "ours, host memory",
}
"""Measured, and its way; vLLM's, with and without priorities, have a cap on streams in one more arm each."""
CAPPED: Final = re.compile(r"(?P<priority>priority, )?capped at (?P<seqs>\d+)")
APART: Final = 0.01
"""Two arms' parts of tokens computed again have an order where they differ by so much."""
WAYS: Final[Mapping[str, Callable[[], Way]]] = {
    "vLLM": FirstCome,
    "vLLM, watermark 0.05": partial(FirstCome, 0.05),
    "vLLM, priorities": ByPriority,
    "vLLM, priorities, watermark 0.05": partial(ByPriority, 0.05),
    "least computed": LeastComputed,
    "SGLang": Retract,
    "SGLang, priorities": RetractForPriority,
    "TensorRT-LLM, no eviction": NoEviction,
    "ours": partial(Ours, DEFAULT_TIERS),
    "ours, host memory": partial(Ours, DEFAULT_TIERS),
}


def arrivals(seed: int) -> list[PressedRequest]:
    """Requests in bursts and lulls."""
    rng = Random(seed)
    found: list[PressedRequest] = []
    for now_s in bursty(rng, RATE_RPS, SECONDS, LULL, BURST):
        tier = rng.choices([*KINDS], [kind[0] for kind in KINDS.values()])[0]
        _, prompt, median, ttft_s, tpot_s = KINDS[tier]
        answer = max(2, min(MOST, round(median * rng.lognormvariate(0.0, 0.7))))
        name = f"{tier}-{len(found)}"
        found.append(
            PressedRequest(name, Tier(tier), now_s, rng.randint(*prompt), answer, MOST, ttft_s, tpot_s)
        )
    return found


def on_a100(blocks: int, *, has_host: bool) -> PressedSetup:
    """The engine with so much memory."""
    block_bytes = 16 * LLAMA_3_8B.kv_bytes_per_token
    return PressedSetup(
        decode_model(LLAMA_3_8B, A100, 1),
        PROMPT_TOKEN_S,
        blocks,
        block_s=block_bytes / PCIE_BYTES_PS,
        host_blocks=blocks // 4 if has_host else 0,
    )


def serve(
    way: str, setup: PressedSetup, asked: Sequence[PressedRequest]
) -> tuple[PressedEngine, dict[str, Any]]:
    """One run, and what came of it."""
    engine = PressedEngine(setup, WAYS[way](), DEFAULT_TIERS)
    engine.run(asked)
    return engine, outcome([engine])


def outcome(engines: Sequence[PressedEngine]) -> dict[str, Any]:
    """What has come of the requests that these have served."""
    done = [one for engine in engines for one in engine.done]
    took_s = max(engine.now_s for engine in engines)
    row: dict[str, Any] = {}
    for tier in KINDS:
        ours = [one for one in done if one.asked.tier == tier]
        row[f"{tier} met"] = statistics.fmean(one.is_met for one in ours)
        row[f"{tier} preempted"] = statistics.fmean(one.preemptions > 0 for one in ours)
        row[f"{tier} ttft p99 s"] = _quantile([one.ttft_s for one in ours], 0.99)
    gaps = [gap for one in done for gap in one.gaps_s]
    tokens = sum(one.emitted for one in done)
    return row | {
        "gap p99 s": _quantile(gaps, 0.99),
        "again": sum(engine.again for engine in engines) / sum(engine.computed for engine in engines),
        "tokens/s": tokens / took_s,
        "goodput": sum(_promised(one) for one in done) / took_s,
    }


def _promised(one: PressedStream) -> bool:
    return one.is_met and one.asked.ttft_s is not None


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


def fullest(asked: Sequence[PressedRequest]) -> int:
    """Blocks that an engine with enough memory holds at most."""
    setup = on_a100(1 << 30, has_host=False)
    most = 0

    class Watching(FirstCome):
        def relieve(self, engine: PressedEngine) -> None:
            nonlocal most
            most = max(most, setup.blocks - engine.free_blocks)

    PressedEngine(setup, Watching(), DEFAULT_TIERS).run(asked)
    return most


def preset() -> list[dict[str, Any]]:
    """Every way on every pool; means over the seeds."""
    rows = []
    streams = [arrivals(seed) for seed in SEEDS]
    whole = [fullest(asked) for asked in streams]
    for pool in POOLS:
        for way in WAYS:
            found = []
            for asked, most in zip(streams, whole, strict=True):
                found.append(serve(way, on_a100(round(pool * most), has_host="host" in way), asked)[1])
            mean = {key: statistics.fmean(one[key] for one in found) for key in found[0]}
            rows.append({"pool": pool, "way": way, **mean})
    return rows


def ways_back() -> list[dict[str, Any]]:
    """For how long the others stand still while a sequence is computed again, or moved out and back."""
    setup = on_a100(1 << 20, has_host=True)
    rules = VictimRules(
        DEFAULT_TIERS.top_rank,
        setup.prompt_token_s,
        setup.model.step_s(32, 32 * 2000),
        setup.chunk_tokens,
        HostRoom(setup.host_blocks, setup.block_s, setup.block_tokens),
    )
    rows = []
    for tokens in LENGTHS:
        stream = Stream("one", 0, 1.0, tokens, setup.blocks_of(tokens), 0, 0, 100)
        rows.append(
            {
                "tokens": tokens,
                "recompute ms": 1e3 * tokens * setup.prompt_token_s,
                "swap ms": 2e3 * setup.blocks_of(tokens) * setup.block_s,
                "chosen": rules.taken_by(stream, 31.0).value,
            }
        )
    assert {row["chosen"] for row in rows} <= {by.value for by in TakenBy}
    return rows


def as_measured() -> dict[str, Any]:
    """The ways on an engine with each run's own step times and arrivals, beside what was measured in it."""
    real = result(REAL)
    given, rounds = real["settings"], real["rounds"]
    by_round = {row["round"]: real_asked(given, row["round"]) for row in rounds}
    model, prompt_token_s = _step_times(rounds)
    rows, same = [], []
    for pool in dict.fromkeys(row["pool"] for row in rounds):
        found = _beside([row for row in rounds if row["pool"] == pool], by_round)
        same += [
            _order(one, other, "again") == _order(one, other, "again, simulated")
            for one, other in itertools.combinations(found, 2)
            if abs(one["again"] - other["again"]) > APART
        ]
        rows += [{"pool": pool, **row} for row in found]
    return {
        "rows": rows,
        "pairs": len(same),
        "same order of again": sum(same) / len(same),
        "worst error of again": max(abs(row["again"] - row["again, simulated"]) for row in rows),
        "fixed_s": model.fixed_s,
        "stream_s": model.request_s,
        "prompt_token_s": prompt_token_s,
    }


def _beside(
    rounds: Sequence[Mapping[str, Any]],
    by_round: Mapping[int, Sequence[PressedRequest]],
) -> list[dict[str, Any]]:
    """What was measured of each arm on one pool, and what is simulated of its way."""
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in rounds):
        if "ample" in arm:
            continue
        measured = [row for row in rounds if row["arm"] == arm]
        way, seqs, blocks = ARMS.get(arm), 256, measured[0]["blocks"]
        if capped := CAPPED.fullmatch(arm):
            way, seqs = ARMS["priority" if capped["priority"] else "stock"], int(capped["seqs"])
        assert way is not None, arm
        simulated = []
        for run in measured:
            setup = _setup(*_step_times([run]), blocks, seqs, has_host="host" in way)
            simulated.append(serve(way, setup, by_round[run["round"]])[1])
        row: dict[str, Any] = {"arm": arm}
        for key in ("premium met", "standard met", "background preempted", "again", "tokens/s"):
            row[key] = statistics.fmean(one[key] for one in measured)
            row[f"{key}, simulated"] = statistics.fmean(one[key] for one in simulated)
        rows.append(row)
    ours = next(row for row in rows if row["arm"] == "ours")
    for row in rows:
        for key in ("tokens/s", "tokens/s, simulated"):
            row[f"{key}, of ours"] = row[key] / ours[key]
    return rows


def measured_setup(real: Mapping[str, Any], row: Mapping[str, Any]) -> PressedSetup:
    """An engine with the step times that were measured, and the memory of one of its rounds."""
    model, prompt_token_s = _step_times(real["rounds"])
    return _setup(model, prompt_token_s, row["blocks"], 256, has_host=False)


def _setup(
    model: DecodeModel, prompt_token_s: float, blocks: int, seqs: int, *, has_host: bool
) -> PressedSetup:
    return PressedSetup(
        model,
        prompt_token_s,
        blocks,
        block_tokens=stepped_run.BLOCK,
        chunk_tokens=128,
        step_tokens=1024,
        max_seqs=seqs,
        block_s=1e-4,
        host_blocks=blocks // 4 if has_host else 0,
        pulls=False,
    )


def _order(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    return bool(one[key] > other[key])


def real_asked(given: Mapping[str, Any], number: int) -> list[PressedRequest]:
    """The requests of a round of the measurement that had these settings."""
    drawn = stepped_run.arrivals(given["seconds"], given["rate"], seed=100 + number)
    return pressed(drawn, stepped_run.KINDS)


def pressed(
    asked: Sequence[stepped_run.Asked], kinds: Mapping[str, stepped_run.Kind]
) -> list[PressedRequest]:
    """What a measurement has asked for, as it is simulated."""
    return [
        PressedRequest(
            one.name,
            Tier(one.tier),
            one.at_s,
            len(one.prompt),
            one.answer,
            stepped_run.MAX_TOKENS,
            kinds[one.tier].ttft_s,
            kinds[one.tier].tpot_s,
        )
        for one in asked
    ]


def _step_times(rounds: Sequence[Mapping[str, Any]]) -> tuple[DecodeModel, float]:
    """Times of a step, of a stream and of a prompt's token that were measured, means of all rounds."""
    of_rounds = ([row[key] for row in rounds] for key in stepped_run.STEP_TIMES)
    fixed_s, stream_s, prompt_token_s = (max(0.0, statistics.fmean(each)) for each in of_rounds)
    return DecodeModel(0.0, stream_s, 0.0, fixed_s, 1 << 60), prompt_token_s


def main() -> None:
    """Simulate everything."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows, back, real = preset(), ways_back(), as_measured()
    for pool in POOLS:
        print_rows(f"memory for {pool} of the fullest", [row for row in rows if row["pool"] == pool])
    print_rows("ways back", back)
    print_rows("beside the measured engine", real["rows"])
    print({key: value for key, value in real.items() if key != "rows"})
    settings = {"seeds": SEEDS, "seconds": SECONDS, "rate_rps": RATE_RPS, "pcie_bytes_ps": PCIE_BYTES_PS}
    print(write("cores/pool_pressure", {**settings, "preset": rows, "ways_back": back, "measured": real}))


if __name__ == "__main__":
    main()
