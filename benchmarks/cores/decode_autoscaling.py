"""Who sizes a decode tier best, in virtual time: our rule, Ray Serve's own, or a fixed fleet.

Llama 3 8B on one A100 a decode replica; prompts of 4,000 tokens on average, answers of 500, and a time per
output token of 30 ms, waits for memory included. Prompts take what they take alone, so that only decode is
looked at. The loads are those of `benchmarks.cores.sizing`, in replicas that would be always full; sizes
under constant loads are held against the capacity plan's. Prints tables and writes
results/cores/decode_autoscaling.json; with `--streams` the sizers that it shows, on so many further
streams, to results/cores/decode_autoscaling_streams.json:

    python -m benchmarks.cores.decode_autoscaling [--workers 2] [--streams 3]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any, Final

from benchmarks.cores import sizing
from benchmarks.cores.sizing import (
    LOADS,
    MOST,
    NOBODY_REFUSED,
    RAY_DEFAULT,
    SEED,
    SETTLED_S,
    START_S,
    TARGET,
    Load,
    Sizing,
)
from benchmarks.report import print_rows, write
from simulator.cost.accelerators import A100, decode_model
from simulator.cost.operators import LLAMA_3_8B, LLAMA_3_8B_A100
from simulator.cost.passes import CostModel
from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import FleetRun, Passage
from simulator.fleet.scaling import DecodeTierSeen, Elasticity
from simulator.fleet.setup import FleetSetup
from simulator.fleet.sizers import ByMemoryAndPace
from simulator.planning.decode_plan import ALONE, decode_load, min_decode_replicas
from simulator.replica.hardware import Hardware
from simulator.workload.arrivals import Kind, Mix, varying
from slo.autoscaling.scaler import ScalingRules
from slo.outcomes import Outcome
from slo.tiers import PREMIUM

HARDWARE: Final = Hardware(CostModel(LLAMA_3_8B, LLAMA_3_8B_A100))
MIX: Final = Mix({"chat": Kind(1.0, 4000, None, PREMIUM, sigma=0.8, output_tokens=500)})
PER_REPLICA: Final = (8.0, 16.0, 24.0, 32.0, 64.0, 96.0)
RAY_SETTINGS: Final = (
    RAY_DEFAULT,
    *((target, *delays_s) for target, delays_s in product(PER_REPLICA, ((5.0, 120.0), (30.0, 600.0)))),
)
Make = Callable[[], Callable[[DecodeTierSeen, float], int]]


def ours() -> ByMemoryAndPace:
    """Our rule."""
    return ByMemoryAndPace(ScalingRules(1, MOST, start_s=START_S))


def setup(replicas: int) -> FleetSetup:
    """A fleet with so many decode replicas."""
    return FleetSetup(
        ALONE,
        HARDWARE,
        1,
        setting={},
        decode_replicas=replicas,
        decode=decode_model(LLAMA_3_8B, A100, 1),
        placement="round_robin",
    )


def full_rps() -> float:
    """Requests per second with which one replica would be always full."""
    return 1.0 / decode_load(setup(1), MIX.stream(1.0, 2000, SEED), 1.0)


def serve(load: Load, seconds: float, make: Make, replicas: int, seed: int = SEED) -> FleetRun:
    """A stream on a tier that begins with so many replicas."""
    rps = full_rps()
    most = sizing.most_of(load, seconds) * rps
    arrivals = varying(MIX, lambda at_s: load(at_s) * rps, most, seconds, seed)
    return simulate(setup(replicas), arrivals, decode_elasticity=Elasticity(make(), START_S))


def is_in_time(passage: Passage) -> bool:
    """Whether an answer kept its time per output token; one token has none to keep."""
    if passage.outcome is not Outcome.FINISHED:
        return False
    objective_s = setup(1).tiers[PREMIUM].tpot_s
    return passage.tpot_s is None or objective_s is None or passage.tpot_s <= objective_s


def _run(workload: str, make: Make, replicas: int, seed: int) -> Sizing:
    load, seconds = LOADS[workload]
    run = serve(load, seconds, make, replicas, seed)
    in_time = [is_in_time(passage) for passage in run.passages]
    sizes = [size for _, size in run.decode_sizes]
    return sizing.sized(in_time, run.waited_for_memory, sizes, run.decode_replica_s)


RUNS: Final = {NOBODY_REFUSED: _run}


def _constantly(load: float) -> dict[str, Any]:
    """Our sizes under a constant load once they have settled, and how many the capacity plan says."""
    run = serve(sizing.constantly(load), 2 * SETTLED_S, ours, 1)
    late = [passage for passage in run.passages if passage.arrival.at_s >= SETTLED_S]
    rate_rps = load * full_rps()
    arrivals = MIX.stream(rate_rps, math.ceil(rate_rps * SETTLED_S), SEED)
    return {
        "load": load,
        "planned": min_decode_replicas(setup(1), arrivals, rate_rps, TARGET),
        **sizing.settled(run.decode_sizes),
        "attainment": sum(is_in_time(passage) for passage in late) / len(late),
    }


def main() -> None:
    """Simulate everything."""
    asked = sizing.options_of(__doc__)
    if asked.streams:
        sizing.on_further_streams(asked, RUNS, ours, "cores/decode_autoscaling")
        return
    with ProcessPoolExecutor(asked.workers) as pool:
        loads = sizing.compare(pool, RUNS, ours, RAY_SETTINGS)
        settled = list(pool.map(_constantly, sizing.CONSTANT))
    sizing.print_loads(loads)
    print_rows("constant loads", settled)
    results = {"seed": SEED, "start_s": START_S, "target": TARGET, "full_rps": full_rps()}
    print(write("cores/decode_autoscaling", {**results, "loads": loads, "constant": settled}))


if __name__ == "__main__":
    main()
