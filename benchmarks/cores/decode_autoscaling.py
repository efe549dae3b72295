"""Who sizes a decode tier best, in virtual time: our rule, Ray Serve's own, or a fixed fleet.

Llama 3 8B on one A100 a decode replica; prompts of 4,000 tokens on average, answers of 500, and a time per
output token of 30 ms, waits for memory included. Prompts take what they take alone, so that only decode is
looked at. The loads are those of `benchmarks.cores.autoscaling`, in replicas that would be always full; sizes
under constant loads are held against the capacity plan's. Prints tables and writes
results/cores/decode_autoscaling.json:

    python -m benchmarks.cores.decode_autoscaling [--workers 2]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, Final

from benchmarks.cores.autoscaling import LOADS, Load
from benchmarks.report import print_rows, write
from simulator.cost.accelerators import A100, decode_model
from simulator.cost.operators import LLAMA_3_8B, LLAMA_3_8B_A100
from simulator.cost.passes import CostModel
from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import FleetRun
from simulator.fleet.scaling import DecodeTierSeen, Elasticity
from simulator.fleet.setup import FleetSetup
from simulator.fleet.sizers import ByMemoryAndPace, ByRequests
from simulator.planning.decode_plan import ALONE, decode_load, min_decode_replicas
from simulator.replica.hardware import Hardware
from simulator.workload.arrivals import Kind, Mix, varying
from slo.autoscaling.scaler import ScalingRules
from slo.tiers import PREMIUM

HARDWARE: Final = Hardware(CostModel(LLAMA_3_8B, LLAMA_3_8B_A100))
MIX: Final = Mix({"chat": Kind(1.0, 4000, None, PREMIUM, sigma=0.8, output_tokens=500)})
SEED: Final = 1
MOST: Final = 8
START_S: Final = 60.0
TARGET: Final = 0.95
SIZES: Final = range(2, 8)
"""Of fixed fleets."""
CONSTANT: Final = (0.5, 1.0, 2.0, 3.0)
SETTLED_S: Final = 600.0
RAY_DEFAULT: Final = (2.0, 30.0, 600.0)
RAY_SETTINGS: Final = (
    RAY_DEFAULT,
    *((target, *delays_s) for target, delays_s in product((32.0, 64.0, 96.0), ((5.0, 120.0), (30.0, 600.0)))),
)
Make = Callable[[], Callable[[DecodeTierSeen, float], int]]


@dataclass(frozen=True, slots=True)
class DecodeSizing:
    """What became of one way to size the tier.

    Attributes:
        attainment: Of all requests, those whose tokens came in time.
        per_replica_hour: Requests of which that is true.
        waited: Of all requests, those for which there was no memory when they came.
        turns: How often the size went up after down, or down after up.
    """

    attainment: float
    waited: float
    replica_hours: float
    per_replica_hour: float
    max_replicas: int
    changes: int
    turns: int


def ours() -> ByMemoryAndPace:
    """Our rule."""
    return ByMemoryAndPace(ScalingRules(1, MOST, start_s=START_S))


def rays(target_ongoing: float, upscale_delay_s: float, downscale_delay_s: float) -> ByRequests:
    """Ray's, with a setting."""
    return ByRequests((1, MOST), target_ongoing, upscale_delay_s, downscale_delay_s)


def _stay(replicas: int, _: DecodeTierSeen, __: float) -> int:
    return replicas


def fixed(replicas: int) -> Callable[[DecodeTierSeen, float], int]:
    """Always as many."""
    return partial(_stay, replicas)


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


def serve(load: Load, seconds: float, make: Make, replicas: int) -> FleetRun:
    """A stream on a tier that begins with so many replicas."""
    rps = full_rps()
    most = max(load(float(second)) for second in range(int(seconds))) * rps
    arrivals = varying(MIX, lambda at_s: load(at_s) * rps, most, seconds, SEED)
    return simulate(setup(replicas), arrivals, decode_elasticity=Elasticity(make(), START_S))


def _is_in_time(tpot_s: float | None) -> bool:
    objective_s = setup(1).tiers[PREMIUM].tpot_s
    return tpot_s is not None and objective_s is not None and tpot_s <= objective_s


def _sized(run: FleetRun) -> DecodeSizing:
    sizes = [size for _, size in run.decode_sizes]
    moves = [after - before for before, after in pairwise(sizes)]
    in_time = sum(_is_in_time(passage.tpot_s) for passage in run.passages)
    hours = run.decode_replica_s / 3600
    return DecodeSizing(
        in_time / len(run.passages),
        run.waited_for_memory,
        hours,
        in_time / hours,
        max(sizes),
        len(moves),
        sum((one > 0) != (other > 0) for one, other in pairwise(moves)),
    )


def _run(workload: str, make: Make, replicas: int) -> DecodeSizing:
    load, seconds = LOADS[workload]
    return _sized(serve(load, seconds, make, replicas))


def _same(load: float, _: float) -> float:
    return load


def _constantly(load: float) -> dict[str, Any]:
    """Our sizes under a constant load once they have settled, and how many the capacity plan says."""
    run = serve(partial(_same, load), 2 * SETTLED_S, ours, 1)
    before = [size for at_s, size in run.decode_sizes if at_s <= SETTLED_S][-1]
    settled = [before, *(size for at_s, size in run.decode_sizes if at_s > SETTLED_S)]
    late = [passage for passage in run.passages if passage.arrival.at_s >= SETTLED_S]
    rate_rps = load * full_rps()
    arrivals = MIX.stream(rate_rps, math.ceil(rate_rps * SETTLED_S), SEED)
    return {
        "load": load,
        "planned": min_decode_replicas(replace(setup(1)), arrivals, rate_rps, TARGET),
        "low": min(settled),
        "high": max(settled),
        "attainment": sum(_is_in_time(passage.tpot_s) for passage in late) / len(late),
    }


def _best(sizings: Mapping[Any, DecodeSizing]) -> Any:
    """Most in time per replica and hour, among those that reach the target if any does."""
    reaching = {key: value for key, value in sizings.items() if value.attainment >= TARGET}
    if not reaching:
        return max(sizings, key=lambda key: sizings[key].attainment)
    return max(reaching, key=lambda key: reaching[key].per_replica_hour)


def compare(pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Every sizer under every varying load."""
    found: dict[str, Any] = {}
    for workload in LOADS:
        own = pool.submit(_run, workload, ours, 1)
        ray: dict[Any, Future[DecodeSizing]] = {
            setting: pool.submit(_run, workload, partial(rays, *setting), 1) for setting in RAY_SETTINGS
        }
        fleets = {size: pool.submit(_run, workload, partial(fixed, size), size) for size in SIZES}
        by_setting = {setting: future.result() for setting, future in ray.items()}
        by_size = {size: future.result() for size, future in fleets.items()}
        tuned, size = _best(by_setting), _best(by_size)
        found[workload] = {
            "ours": asdict(own.result()),
            "ray": asdict(by_setting[RAY_DEFAULT]),
            "ray_tuned": {"setting": tuned, **asdict(by_setting[tuned])},
            "fixed": {"replicas": size, **asdict(by_size[size])},
            "all_ray": [{"setting": key, **asdict(value)} for key, value in by_setting.items()],
            "all_fixed": [{"replicas": key, **asdict(value)} for key, value in by_size.items()],
        }
    return found


def main() -> None:
    """Simulate everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    with ProcessPoolExecutor(parser.parse_args().workers) as pool:
        loads = compare(pool)
        settled = list(pool.map(_constantly, CONSTANT))
    for workload, arms in loads.items():
        rows = [
            {
                "arm": name,
                "in time %": 100 * arms[name]["attainment"],
                "waited %": 100 * arms[name]["waited"],
                "replica hours": arms[name]["replica_hours"],
                "in time per replica hour": arms[name]["per_replica_hour"],
                "most replicas": arms[name]["max_replicas"],
                "turns": arms[name]["turns"],
            }
            for name in ("ours", "ray", "ray_tuned", "fixed")
        ]
        print_rows(workload, rows)
    print_rows("constant loads", settled)
    results = {"seed": SEED, "start_s": START_S, "target": TARGET, "full_rps": full_rps()}
    print(write("cores/decode_autoscaling", {**results, "loads": loads, "constant": settled}))


if __name__ == "__main__":
    main()
