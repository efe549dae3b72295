"""Who sizes a prefill tier best, in virtual time: our rule, Ray Serve's own, or a fixed fleet.

All see the same streams: a step, a day's curve in forty minutes, and constant loads, whose sizes are held
against the fewest replicas that reach the target. A replica takes a minute to start and is paid for from its
order to its end. Ray's policy runs with its defaults, and with the best of several settings. Prints tables
and writes results/cores/autoscaling.json:

    python -m benchmarks.cores.autoscaling [--workers 2]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any, Final

from benchmarks.report import print_rows, write
from simulator.arms.arms import ARMS
from simulator.cost.decode_steps import INSTANT_DECODE
from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import FleetRun
from simulator.fleet.scaling import Elasticity, PrefillTierSeen
from simulator.fleet.setup import FleetSetup
from simulator.fleet.sizers import ByRequests, ByWork
from simulator.study.goodput import Experiment
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import varying
from slo.admission.controller import AdmissionRules
from slo.autoscaling.scaler import ScalingRules
from slo.predict.handoff import INSTANT_LINK

PRESET: Final = PRESETS["flowprefill-70b"]
SEED: Final = 1
MOST: Final = 8
START_S: Final = 60.0
TARGET: Final = 0.95
DAY_S: Final = 2400.0
SIZES: Final = range(2, 8)
"""Of fixed fleets."""
CONSTANT: Final = (0.5, 1.0, 2.0, 3.0)
SETTLED_S: Final = 600.0
Load = Callable[[float], float]
Sizer = Callable[[PrefillTierSeen, float], int]


def step(at_s: float) -> float:
    """Work that arrives per second: for half a replica, and six times as much for a quarter of an hour."""
    begins_s, ends_s = 600, 1500
    return 3.0 if begins_s <= at_s < ends_s else 0.5


def day(at_s: float) -> float:
    """A night and a day, from a half to four replicas' work."""
    return 2.25 - 1.75 * math.cos(2 * math.pi * at_s / DAY_S)


LOADS: Final[Mapping[str, tuple[Load, float]]] = {"step": (step, 2400.0), "day": (day, DAY_S)}


@dataclass(frozen=True, slots=True)
class Sizing:
    """What became of one way to size the tier.

    Attributes:
        attainment: Of all requests; refused ones are not in time.
        per_replica_hour: Requests in time.
        turns: How often the size went up after down, or down after up.
    """

    attainment: float
    refused: float
    replica_hours: float
    per_replica_hour: float
    max_replicas: int
    changes: int
    turns: int


def ours() -> Sizer:
    """Our rule."""
    return ByWork(ScalingRules(1, MOST, start_s=START_S))


def rays(target_ongoing: float, upscale_delay_s: float, downscale_delay_s: float) -> Sizer:
    """Ray's, with a setting."""
    return ByRequests((1, MOST), target_ongoing, upscale_delay_s, downscale_delay_s)


def _stay(replicas: int, _: PrefillTierSeen, __: float) -> int:
    return replicas


def fixed(replicas: int) -> Sizer:
    """Always as many."""
    return partial(_stay, replicas)


RAY_DEFAULT: Final = (2.0, 30.0, 600.0)
RAY_SETTINGS: Final = tuple(
    (target, *delays_s) for target, delays_s in product((1.0, 2.0, 4.0), ((5.0, 120.0), (30.0, 600.0)))
)


def serve(load: Load, seconds: float, make: Callable[[], Sizer], replicas: int) -> FleetRun:
    """A stream on a tier that begins with so many replicas."""
    setup = FleetSetup(
        ARMS["slackserve"],
        PRESET.hardware,
        replicas,
        decode=INSTANT_DECODE,
        link=INSTANT_LINK,
        handoff_s=0.0,
        admission=AdmissionRules(),
    )
    rps = Experiment(PRESET.hardware, PRESET.workload, 1, (SEED,)).capacity_rps()
    most = max(load(float(second)) for second in range(int(seconds))) * rps
    arrivals = varying(PRESET.workload, lambda at_s: load(at_s) * rps, most, seconds, SEED)
    return simulate(setup, arrivals, elasticity=Elasticity(make(), START_S))


def _sized(run: FleetRun) -> Sizing:
    sizes = [size for _, size in run.sizes]
    moves = [after - before for before, after in pairwise(sizes)]
    in_time = sum(job.is_on_time for job in run.jobs)
    hours = run.replica_s / 3600
    return Sizing(
        run.attainment,
        run.refused,
        hours,
        in_time / hours,
        max(sizes),
        len(moves),
        sum((one > 0) != (other > 0) for one, other in pairwise(moves)),
    )


def _run(workload: str, make: Callable[[], Sizer], replicas: int) -> Sizing:
    load, seconds = LOADS[workload]
    return _sized(serve(load, seconds, make, replicas))


def _constantly(load: float, make: Callable[[], Sizer], replicas: int) -> dict[str, float]:
    """The sizes that a tier has under a constant load once it has settled, and its attainment."""
    run = serve(partial(_same, load), 2 * SETTLED_S, make, replicas)
    before = [size for at_s, size in run.sizes if at_s <= SETTLED_S][-1]
    settled = [before, *(size for at_s, size in run.sizes if at_s > SETTLED_S)]
    late = [job for job in run.jobs if job.arrival.at_s >= SETTLED_S]
    attainment = sum(job.is_on_time for job in late) / len(late)
    return {"low": min(settled), "high": max(settled), "attainment": attainment}


def _same(load: float, _: float) -> float:
    return load


def compare(pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Every sizer under every varying load."""
    found: dict[str, Any] = {}
    for workload in LOADS:
        own = pool.submit(_run, workload, ours, 1)
        ray = {setting: pool.submit(_run, workload, partial(rays, *setting), 1) for setting in RAY_SETTINGS}
        fleets = {size: pool.submit(_run, workload, partial(fixed, size), size) for size in SIZES}
        by_setting = {setting: future.result() for setting, future in ray.items()}
        by_size = {size: future.result() for size, future in fleets.items()}
        tuned = _best(by_setting)
        size = _best(by_size)
        found[workload] = {
            "ours": asdict(own.result()),
            "ray": asdict(by_setting[RAY_DEFAULT]),
            "ray_tuned": {"setting": tuned, **asdict(by_setting[tuned])},
            "fixed": {"replicas": size, **asdict(by_size[size])},
            "all_ray": [{"setting": key, **asdict(value)} for key, value in by_setting.items()],
            "all_fixed": [{"replicas": key, **asdict(value)} for key, value in by_size.items()],
        }
    return found


def _best(sizings: Mapping[Any, Sizing]) -> Any:
    """Most in time per replica and hour, among those that reach the target if any does."""
    reaching = {key: value for key, value in sizings.items() if value.attainment >= TARGET}
    if not reaching:
        return max(sizings, key=lambda key: sizings[key].attainment)
    return max(reaching, key=lambda key: reaching[key].per_replica_hour)


def constants(pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Our sizes under constant loads, and the fewest replicas that reach the target."""
    own = {load: pool.submit(_constantly, load, ours, 1) for load in CONSTANT}
    tried = {
        (load, size): pool.submit(_constantly, load, partial(fixed, size), size)
        for load in CONSTANT
        for size in range(max(1, math.floor(load)), math.floor(load) + 4)
    }
    rows = []
    for load in CONSTANT:
        sizes = [size for each, size in tried if each == load]
        enough = [size for size in sizes if tried[load, size].result()["attainment"] >= TARGET]
        rows.append({"load": load, "planned": min(enough, default=None), **own[load].result()})
    return rows


def main() -> None:
    """Simulate everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    with ProcessPoolExecutor(parser.parse_args().workers) as pool:
        loads, settled = compare(pool), constants(pool)
    for workload, arms in loads.items():
        rows = []
        for name in ("ours", "ray", "ray_tuned", "fixed"):
            arm = arms[name]
            rows.append(
                {
                    "arm": name,
                    "in time %": 100 * arm["attainment"],
                    "replica hours": arm["replica_hours"],
                    "in time per replica hour": arm["per_replica_hour"],
                    "most replicas": arm["max_replicas"],
                    "turns": arm["turns"],
                }
            )
        print_rows(workload, rows)
    print_rows("constant loads", settled)
    results = {"seed": SEED, "preset": PRESET.name, "start_s": START_S, "target": TARGET}
    print(write("cores/autoscaling", {**results, "loads": loads, "constant": settled}))


if __name__ == "__main__":
    main()
