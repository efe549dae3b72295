"""The results of `comparison.run`: medians and spreads, the verdict, the tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

if TYPE_CHECKING:
    from benchmarks.comparison.load import ArmRun

OURS = "slackserve"
STOCK = "stock"
TARGET_STOCK = 0.45
TARGET_RATIO = 2.0
TARGET_THROUGHPUT = 0.05
_MEASURED = ("urgent", "long", "overall", "prompt_tokens_ps", "preemptions")


def summary(runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
    """Median, minimum and maximum over the rounds, by load and arm."""
    found = []
    for load in sorted({run.load for run in runs}):
        for arm in dict.fromkeys(run.arm for run in runs):
            same = [run for run in runs if (run.load, run.arm) == (load, arm)]
            if same:
                row: dict[str, Any] = {"load": load, "arm": arm, "rounds": len(same)}
                row |= {name: spread([getattr(run, name) for run in same]) for name in _MEASURED}
                for kind, point in (("urgent", "p50"), ("urgent", "p90"), ("long", "p50")):
                    ttfts_ms = [run.ttft_ms.get(kind, {}).get(point, 0.0) for run in same]
                    row[f"{kind}_ttft_{point}_ms"] = spread(ttfts_ms)
                row["unserved"] = sum(sum(run.refused.values()) + sum(run.failed.values()) for run in same)
                found.append(row)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def verdict(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At each load: ours against the stock arm that has most urgent requests in time."""
    found = []
    for load in sorted({row["load"] for row in rows}):
        here = {row["arm"]: row for row in rows if row["load"] == load}
        stock = [row for name, row in here.items() if name.startswith(STOCK)]
        if OURS not in here or not stock:
            continue
        best = max(stock, key=lambda row: row["urgent"]["median"])
        ours_urgent, best_urgent = here[OURS]["urgent"]["median"], best["urgent"]["median"]
        throughput = here[OURS]["prompt_tokens_ps"]["median"] / best["prompt_tokens_ps"]["median"] - 1
        is_asked = best_urgent <= TARGET_STOCK
        found.append(
            {
                "load": load,
                "best_stock": best["arm"],
                "best_stock_urgent": best_urgent,
                "ours_urgent": ours_urgent,
                "ratio": ours_urgent / best_urgent if best_urgent else None,
                "throughput_difference": throughput,
                "stock_at_most_45_percent": is_asked,
                "target_met": is_asked
                and ours_urgent >= TARGET_RATIO * best_urgent
                and throughput >= -TARGET_THROUGHPUT,
            }
        )
    return found


_COLUMNS = (
    "urgent\nin time",
    "(range)",
    "long\nin time",
    "all\nin time",
    "urgent TTFT\np50/p90, ms",
    "long TTFT\np50, ms",
    "tokens\n/s",
    "stops",
    "unserved",
)


def loads_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row for each load and arm: medians, with minimum and maximum where that matters."""
    table = Table("load", Column("arm", no_wrap=True))
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, row["load"]):
            table.add_section()
        before = row["load"]
        table.add_row(
            f"{row['load']:g}",
            row["arm"],
            f"{row['urgent']['median']:.0%}",
            f"{row['urgent']['min']:.0%}-{row['urgent']['max']:.0%}",
            f"{row['long']['median']:.0%}",
            f"{row['overall']['median']:.0%}",
            f"{row['urgent_ttft_p50_ms']['median']:.0f}/{row['urgent_ttft_p90_ms']['median']:.0f}",
            f"{row['long_ttft_p50_ms']['median']:.0f}",
            f"{row['prompt_tokens_ps']['median']:.0f}",
            f"{row['preemptions']['median']:g}",
            str(row["unserved"]),
        )
    return table
