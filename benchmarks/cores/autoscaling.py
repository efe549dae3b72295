"""Who sizes a prefill tier best, in virtual time: our rule, Ray Serve's own, or a fixed fleet.

All see the same streams: a step, a day's curve in forty minutes, and constant loads, whose sizes are held
against the fewest replicas that reach the target. A replica takes a minute to start and is paid for from its
order to its end. Ray's policy runs with its defaults, and with the best of several settings. It counts the
requests at the replicas, and never sees those that are refused: it and the fixed fleets run behind the
router's refusals and with nobody refused, and the better one of both is shown. Prints tables and writes
results/cores/autoscaling.json; with `--streams` the sizers that it shows, on so many further streams, to
results/cores/autoscaling_streams.json:

    python -m benchmarks.cores.autoscaling [--workers 2] [--streams 3]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import Any, Final

from benchmarks.cores import sizing
from benchmarks.cores.sizing import (
    LOADS,
    MOST,
    NOBODY_REFUSED,
    SEED,
    SETTLED_S,
    START_S,
    TARGET,
    Load,
    Run,
    Sizing,
)
from benchmarks.report import print_rows, write
from simulator.arms.arms import ARMS
from simulator.cost.decode_steps import INSTANT_DECODE
from simulator.fleet.fleet import simulate
from simulator.fleet.outcome import FleetRun
from simulator.fleet.scaling import Elasticity, PrefillTierSeen
from simulator.fleet.setup import FleetSetup
from simulator.fleet.sizers import ByWork
from simulator.study.goodput import Experiment
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import varying
from slo.admission.rules import AdmissionRules
from slo.autoscaling.scaler import PREFILL_BUSY, ScalingRules
from slo.predict.handoff import INSTANT_LINK

PRESET: Final = PRESETS["flowprefill-70b"]
RAY_SETTINGS: Final = tuple(
    (target, *delays_s)
    for target, delays_s in product((1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0), ((5.0, 120.0), (30.0, 600.0)))
)
Make = Callable[[], Callable[[PrefillTierSeen, float], int]]


def ours() -> ByWork:
    """Our rule."""
    return ByWork(ScalingRules(1, MOST, start_s=START_S, busy=PREFILL_BUSY))


def serve(
    load: Load, seconds: float, make: Make, replicas: int, seed: int = SEED, *, refuses: bool = True
) -> FleetRun:
    """A stream on a tier that begins with so many replicas; `refuses` is whether its router refuses any."""
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
    most = sizing.most_of(load, seconds) * rps
    arrivals = varying(PRESET.workload, lambda at_s: load(at_s) * rps, most, seconds, seed)
    fleet = setup if refuses else setup.taking_all()
    return simulate(fleet, arrivals, elasticity=Elasticity(make(), START_S))


def _run(workload: str, make: Make, replicas: int, seed: int, *, refuses: bool) -> Sizing:
    load, seconds = LOADS[workload]
    run = serve(load, seconds, make, replicas, seed, refuses=refuses)
    in_time = [job.is_on_time for job in run.jobs]
    return sizing.sized(in_time, run.refused, [size for _, size in run.sizes], run.replica_s)


RUNS: Final[Mapping[str, Run]] = {
    "with refusals": partial(_run, refuses=True),
    NOBODY_REFUSED: partial(_run, refuses=False),
}


def _constantly(load: float, make: Make, replicas: int, *, refuses: bool) -> dict[str, float]:
    """The sizes that a tier has under a constant load once it has settled, and its attainment."""
    run = serve(sizing.constantly(load), 2 * SETTLED_S, make, replicas, refuses=refuses)
    late = [job for job in run.jobs if job.arrival.at_s >= SETTLED_S]
    return {**sizing.settled(run.sizes), "attainment": sum(job.is_on_time for job in late) / len(late)}


def constants(pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Our sizes under constant loads, and the fewest replicas that reach the target."""
    own = {load: pool.submit(_constantly, load, ours, 1, refuses=True) for load in sizing.CONSTANT}
    tried = {
        (load, size, refuses): pool.submit(
            _constantly, load, partial(sizing.fixed, size), size, refuses=refuses
        )
        for load in sizing.CONSTANT
        for size in range(max(1, math.floor(load)), math.floor(load) + 4)
        for refuses in (True, False)
    }
    rows = []
    for load in sizing.CONSTANT:
        enough = [
            size
            for (each, size, _), run in tried.items()
            if each == load and run.result()["attainment"] >= TARGET
        ]
        rows.append({"load": load, "planned": min(enough, default=None), **own[load].result()})
    return rows


def main() -> None:
    """Simulate everything."""
    asked = sizing.options_of(__doc__)
    if asked.streams:
        sizing.on_further_streams(asked, RUNS, ours, "cores/autoscaling")
        return
    with ProcessPoolExecutor(asked.workers) as pool:
        loads, settled = sizing.compare(pool, RUNS, ours, RAY_SETTINGS), constants(pool)
    sizing.print_loads(loads)
    print_rows("constant loads", settled)
    results = {"seed": SEED, "preset": PRESET.name, "start_s": START_S, "target": TARGET}
    print(write("cores/autoscaling", {**results, "loads": loads, "constant": settled}))


if __name__ == "__main__":
    main()
