"""Whether short prompts come sooner when decode computes them (`kv_transfer.local_below`), in virtual time.

Two prefill and two decode replicas of Llama 3 8B on A100s. Seven tenths of the prompts are short (a mean of
100 tokens), the others a mean of 4,000; the same streams are served with several limits. Means over all
requests of a kind; `whole` is the time from arrival to the last token. Writes
results/cores/local_below_simulated.json:

    python -m benchmarks.cores.local_below
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.report import print_rows, write
from router.fleet.view import RouterLimits
from simulator.arms.arms import ARMS
from simulator.cost.accelerators import A100, decode_model
from simulator.cost.operators import LLAMA_3_8B, LLAMA_3_8B_A100
from simulator.cost.passes import CostModel
from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import FleetRun, Passage
from simulator.fleet.setup import FleetSetup
from simulator.replica.hardware import Hardware
from simulator.workload.arrivals import Kind, Mix
from slo.predict.handoff import Link
from slo.tiers import BACKGROUND, PREMIUM

HARDWARE: Final = Hardware(CostModel(LLAMA_3_8B, LLAMA_3_8B_A100))
LINKS: Final = {"25 GB/s": Link(25e9, 0.002), "3 GB/s": Link(3e9, 0.005)}
HANDOFF_S: Final = 0.01
LIMITS: Final = (0, 32, 64, 128, 256)
RATES_RPS: Final = (4.0, 12.0, 20.0)
REQUESTS, SEEDS = 1500, (1, 2, 3)
COLUMNS: Final = {name: name for name in ("link", "rate_rps", "below", "by_decode")} | {
    f"{kind} {name}": f"{kind}.{name}"
    for kind in ("short", "long")
    for name in ("ttft_ms", "tpot_ms", "whole_ms")
}
MIX: Final = Mix(
    {
        "short": Kind(0.7, 100, None, PREMIUM, sigma=0.8, output_tokens=100),
        "long": Kind(0.3, 4000, None, BACKGROUND, output_tokens=200),
    }
)


def served(below: int, rate_rps: float, link: Link, seed: int) -> FleetRun:
    """One run."""
    setup = FleetSetup(
        ARMS["slackserve"],
        HARDWARE,
        2,
        decode_replicas=2,
        decode=decode_model(LLAMA_3_8B, A100, 1),
        link=link,
        limits=RouterLimits(local_prefill=True, local_below_tokens=below),
        handoff_s=HANDOFF_S,
    )
    return simulate(setup, MIX.stream(rate_rps, REQUESTS, seed))


def _ttft_s(passage: Passage) -> float | None:
    return None if passage.job is None else passage.job.ttft_s


def _whole_s(passage: Passage) -> float | None:
    if passage.job is None:
        return None
    return passage.job.ttft_s + (passage.tpot_s or 0.0) * (passage.arrival.output_tokens - 1)


def mean_ms(runs: Sequence[FleetRun], kind: str, of: Callable[[Passage], float | None]) -> float:
    """The mean over the requests of a kind."""
    values = [of(one) for run in runs for one in run.passages if one.arrival.kind == kind]
    return round(1e3 * statistics.mean(value for value in values if value is not None), 2)


def row(link: str, rate_rps: float, below: int) -> dict[str, Any]:
    """What a limit gives under a load."""
    runs = [served(below, rate_rps, LINKS[link], seed) for seed in SEEDS]
    passages = [one for run in runs for one in run.passages]
    return {
        "link": link,
        "rate_rps": rate_rps,
        "below": below,
        "by_decode": sum(one.prefill_replica is None for one in passages) / len(passages),
        "short": {
            "ttft_ms": mean_ms(runs, "short", _ttft_s),
            "tpot_ms": mean_ms(runs, "short", lambda one: one.tpot_s),
            "whole_ms": mean_ms(runs, "short", _whole_s),
        },
        "long": {
            "ttft_ms": mean_ms(runs, "long", _ttft_s),
            "tpot_ms": mean_ms(runs, "long", lambda one: one.tpot_s),
            "whole_ms": mean_ms(runs, "long", _whole_s),
        },
    }


def main() -> None:
    """Simulate, print and write."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [row(link, rate, below) for link in LINKS for rate in RATES_RPS for below in LIMITS]
    print_rows("Prompts computed by decode", rows, COLUMNS)
    write("cores/local_below_simulated", {"rows": rows})


if __name__ == "__main__":
    main()
