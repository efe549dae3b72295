"""What the simulator makes of a GPU's operator times, beside what was measured on that GPU.

Whole passes by their length, and the time from an order, at any moment of a pass, until the device is idle.

    python -m benchmarks.gpu.predicted
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from typing import Any, Final

from benchmarks.report import RESULTS, print_rows, result, summary, write
from simulator.cost.passes import CostModel, Granularity, PassTimes
from simulator.study.presets import PRESETS, with_operator_times

_TOKENS: Final = 8192
_GRANULARITIES: Final = {"operator": Granularity.REPLAYED, "layer": Granularity.LAYER}
_AHEADS_MS: Final = (0.5, 1.0, 2.0)
_MOMENTS: Final = 20_000


def standstill_ms(times: PassTimes, ahead_s: float) -> list[float]:
    """Milliseconds from an order to standstill, at moments spread evenly over a pass.

    The host is `ahead_s` before the device, or at the next boundary: it stops at the first that it has not
    reached when the order comes. An order that finds none left waits for the end.
    """
    waits_ms = []
    for number in range(_MOMENTS):
        now_s = (number + 0.5) / _MOMENTS * times.total_s
        boundary = times.passed(now_s + ahead_s) + 1
        stands_s = times.at_s(boundary) if boundary < times.boundaries else times.total_s
        waits_ms.append((stands_s - now_s) * 1e3)
    return waits_ms


def predicted(cost_of: dict[str, CostModel], measured: dict[int, float]) -> dict[str, Any]:
    """Passes of the lengths that were measured, and stops of a long one, by granularity and launch-ahead."""
    any_cost = next(iter(cost_of.values()))
    passes = [
        {"tokens": tokens, "measured_ms": ms, "predicted_ms": any_cost.times([(tokens, 0)]).total_s * 1e3}
        for tokens, ms in measured.items()
    ]
    stops = [
        {
            "variant": f"{name}, ahead {ahead_ms:g} ms",
            **summary(standstill_ms(cost.times([(_TOKENS, 0)]), ahead_ms / 1e3)),
        }
        for name, cost in cost_of.items()
        for ahead_ms in _AHEADS_MS
    ]
    return {"passes": passes, "stops": stops}


def main() -> None:
    """Predict, and keep it beside the measurements."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    preset = with_operator_times(PRESETS["flowprefill-8b"], RESULTS / "gpu" / "operators.csv")
    cost_of = {name: preset.hardware.at(granularity) for name, granularity in _GRANULARITIES.items()}
    found = predicted(cost_of, _medians())
    print_rows("Whole passes, ms", found["passes"])
    print_rows(f"Order to standstill, {_TOKENS} tokens, ms", found["stops"])
    print(write("gpu/predicted", found))


def _medians() -> dict[int, float]:
    times = defaultdict(list)
    for row in result("gpu/mechanism_profile")["passes"]:
        times[row["tokens"]].append(row["ms"])
    return {tokens: statistics.median(all_ms) for tokens, all_ms in times.items()}


if __name__ == "__main__":
    main()
