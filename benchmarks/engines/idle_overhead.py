"""What boundaries and votes cost that never fire: the same engine with and without them, in one run.

Each pair prefills the same prompt once with and once without, in alternating order; the ratio of a pair is
what its two halves took. Prompts are random, so nothing comes from the prefix cache. A compiled pass without
boundaries is vLLM's own function.

    python -m benchmarks.engines.idle_overhead [--compiled]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.offline_engine import BAREABLE_WORKER, in_own_process, offline_engine, prefill_s
from benchmarks.harness.tiny_models import build_tiny
from benchmarks.report import overhead, write
from prefill_node.engine_setup import EngineSetup

TOKENS = (512, 2048)


def measure(llm: Any, board: Any, tokens: int, pairs: int) -> dict[str, Any]:
    """Times with and without boundaries, and their ratios."""
    rng = random.Random(tokens)
    core = llm.llm_engine.engine_core.engine_core
    times: dict[bool, list[float]] = {True: [], False: []}
    votes = board.boundaries_reached(0)
    for number in range(pairs + 2):
        for on in (True, False) if number % 2 else (False, True):
            core.model_executor.collective_rpc("with_boundaries", args=(on,))
            seconds = prefill_s(llm, [rng.randrange(250) for _ in range(tokens)])
            if number >= 2:  # the first touch memory  # noqa: PLR2004
                times[on].append(seconds)
    return {
        "tokens": tokens,
        "pairs": pairs,
        "votes": board.boundaries_reached(0) - votes,
        "without_ms": statistics.median(times[False]) * 1e3,
        "with_ms": statistics.median(times[True]) * 1e3,
        "overhead_of_medians": statistics.median(times[True]) / statistics.median(times[False]) - 1,
        **overhead(times[True], times[False]),
    }


def measure_engine(ranks: int, pairs: int, setup: EngineSetup, lengths: list[int]) -> list[dict[str, Any]]:
    """All prompt lengths on one engine; for a process of its own."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = build_tiny(Path(directory), "llama", layers=16, hidden=512)
        with offline_engine(
            model,
            BAREABLE_WORKER,
            ranks=ranks,
            setup=setup,
            enforce_eager=not setup.compiled,
            max_model_len=4096,
            max_num_batched_tokens=4096,
        ) as (llm, board):
            for tokens in lengths:
                row = {"ranks": ranks, "granularity": setup.granularity, "compiled": setup.compiled}
                row |= measure(llm, board, tokens, pairs * min(lengths) // tokens)
                rows.append(row)
                print(
                    f"TP {ranks}, {tokens:5} tokens: {row['without_ms']:7.1f} ms without, "
                    f"{row['with_ms']:7.1f} ms with, overhead {row['overhead']:+.2%} "
                    f"({row['interval'][0]:+.2%} to {row['interval'][1]:+.2%})",
                    flush=True,
                )
    return rows


def main() -> None:
    """Measure at tensor parallelism 1 and 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300, help="of the shortest prompt; longer ones: fewer")
    parser.add_argument("--granularity", default="operator", help="layer, sublayer or operator")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--compiled", action="store_true", help="vLLM compiles the passes, with inductor")
    arguments = parser.parse_args()
    setup = EngineSetup(mode="resume", granularity=arguments.granularity, compiled=arguments.compiled)
    rows = []
    for ranks in (1, 2):
        rows += in_own_process(measure_engine, ranks, arguments.pairs, setup, arguments.tokens)
    print(write(f"engines/idle_overhead{'_compiled' if setup.compiled else ''}", {"rows": rows}))


if __name__ == "__main__":
    main()
