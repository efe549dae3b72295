"""The report's tables, as text in cells, and its result in a few sentences made from the numbers.

Owns which columns there are; the template owns their look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from simulator.findings import ArmFindings, Findings, Point
from simulator.report.canvas import LEAD, REFERENCE, arm_styles
from simulator.report.wording import (
    MISSING,
    TIMES,
    is_finite,
    level,
    milliseconds,
    number,
    percent,
    plain,
    rate,
    ratio,
)

MAIN_LEVEL: Final = "0.90"


def goodput(item: ArmFindings, key: str = MAIN_LEVEL) -> float:
    """Requests per second; 0 where the level is never reached or was not looked for."""
    value = item.goodput_rps.get(key, 0.0)
    return value if is_finite(value) else 0.0


def goodput_levels(arms: Sequence[ArmFindings]) -> list[str]:
    """The levels that goodput was looked for at, in ascending order."""
    return sorted({key for item in arms for key in item.goodput_rps}, key=float)


def lead_arm(findings: Findings) -> ArmFindings | None:
    """Ours where it is compared, otherwise the arm with the highest goodput."""
    ours = next((item for item in findings.arms if item.arm == LEAD), None)
    return ours or max(findings.arms, key=goodput, default=None)


def reference_arm(arms: Sequence[ArmFindings]) -> ArmFindings | None:
    """Order of arrival where it is compared, otherwise the first arm."""
    return next((item for item in arms if item.arm == REFERENCE), next(iter(arms), None))


def point_near(item: ArmFindings, rate_rps: float) -> Point | None:
    """The simulated rate next to one."""
    return min(item.points, key=lambda point: abs(point.rate_rps - rate_rps), default=None)


def takeaway(findings: Findings) -> str:
    """A paragraph: what the lead serves in time, against the others, and what it took."""
    lead = lead_arm(findings)
    if lead is None:
        return "Nothing was compared."
    served = goodput(lead)
    if served <= 0:
        return f"At none of the rates {lead.title} has {level(MAIN_LEVEL)} of first tokens in time."
    first = f"{lead.title} serves {rate(served)} with {level(MAIN_LEVEL)} in time"
    sentences = [first + _against(findings, lead)]
    for key in sorted(lead.goodput_rps, key=float):
        if key != MAIN_LEVEL and goodput(lead, key) > 0:
            sentences.append(f"With {level(key)} in time it is {rate(goodput(lead, key))}")  # noqa: PERF401
    sentences += _cost(lead, served)
    return ". ".join(sentences) + "."


def _against(findings: Findings, lead: ArmFindings) -> str:
    others = [item for item in findings.arms if item is not lead]
    if not others:
        return ""
    reference = reference_arm(others)
    best = max(others, key=goodput)
    if reference is None or reference is best:
        return f", {_times(lead, best)}"
    rank = "the next best" if goodput(lead) >= goodput(best) else "the best"
    to_best = f"{ratio(goodput(lead), goodput(best))} {rank}, {best.title}"
    if goodput(reference) <= 0:
        return f", {to_best}; {reference.title} does so at no rate"
    return f", {_times(lead, reference)} and {to_best}"


def _times(lead: ArmFindings, other: ArmFindings) -> str:
    times = ratio(goodput(lead), goodput(other))
    return f"{times} {other.title}" if times != MISSING else f"which {other.title} does at no rate"


def _cost(lead: ArmFindings, served_rps: float) -> list[str]:
    sentences = []
    if lead.blocking is not None:
        sentences.append(
            f"A pass that it stops stands still after {milliseconds(lead.blocking.mean)} on average and "
            f"{milliseconds(lead.blocking.p99)} at the 99th percentile"
        )
    point = point_near(lead, served_rps)
    if point is not None and point.wasted_work > 0:
        sentences.append(f"Work done again is {percent(point.wasted_work)} of all work")
    return sentences


@dataclass(frozen=True, slots=True)
class Row:
    """An arm's row.

    Attributes:
        colour: The arm's in the plots.
        cells: One for each column, but the first, which is the name.
        fractions: The values of cells that are fractions, for shading; None for others.
    """

    title: str
    colour: str
    is_lead: bool
    cells: Sequence[str]
    fractions: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows; without rows it is not shown."""

    columns: Sequence[str]
    rows: Sequence[Row]


def goodput_table(findings: Findings) -> Table:
    """Requests per second at each level, with the ratio to the reference."""
    reference = reference_arm(findings.arms)
    levels = goodput_levels(findings.arms)
    columns: list[str] = []
    for key in levels:
        columns.append(f"{level(key)} in time")
        columns += [f"{TIMES} {reference.title}"] if reference else []
    rows = []
    for item in findings.arms:
        cells: list[str] = []
        for key in levels:
            value = goodput(item, key)
            cells.append(f"{number(value)}/s" if value > 0 else "never")
            cells += [ratio(value, goodput(reference, key))] if reference else []
        rows.append(_row(findings, item, cells))
    return Table(columns, rows if levels else [])


def kinds_table(findings: Findings) -> tuple[float, Table]:
    """Attainment by kind at the lead's goodput, and that rate; each arm at its nearest simulated rate."""
    boost = lead_arm(findings)
    at_rps = (goodput(boost) if boost else 0.0) or findings.cdf_rate_rps
    points = [(item, point_near(item, at_rps)) for item in findings.arms]
    seen = [kind for _, point in points if point for kind in point.by_kind]
    kinds = [kind for kind in dict.fromkeys([*findings.objective_ms, *seen]) if kind in set(seen)]
    rows = []
    for item, point in points:
        if point is None:
            continue
        values = [point.attainment, *(point.by_kind.get(kind) for kind in kinds)]
        cells = [f"{number(point.rate_rps)}/s", *map(percent, values)]
        rows.append(_row(findings, item, cells, (None, *values)))
    objectives = ((kind, findings.objective_ms.get(kind)) for kind in kinds)
    headings = [kind if ms is None else f"{kind}\n{milliseconds(ms)}" for kind, ms in objectives]
    return at_rps, Table(["load", "all", *headings], rows)


def work_table(findings: Findings) -> Table:
    """What each arm does at its own goodput: stops, work done again, throughput, tuning."""
    rows = []
    for item in findings.arms:
        point = point_near(item, goodput(item)) if goodput(item) > 0 else None
        if point is None:
            continue
        cells = [
            f"{number(point.rate_rps)}/s",
            plain(point.preemptions),
            percent(point.wasted_work),
            number(point.prompt_tokens_ps),
            _setting(point.setting),
        ]
        rows.append(_row(findings, item, cells))
    columns = ["load", "stops per request", "work done again", "prompt tokens/s", "tuned to"]
    if all(row.cells[-1] == MISSING for row in rows):
        columns, rows = columns[:-1], [replace(row, cells=row.cells[:-1]) for row in rows]
    return Table(columns, rows)


def blocking_table(findings: Findings) -> Table:
    """Quantiles of the blocking time."""
    rows = []
    for item in findings.arms:
        blocking = item.blocking
        if blocking is not None:
            times = (blocking.mean, blocking.p50, blocking.p90, blocking.p99, blocking.max)
            rows.append(_row(findings, item, [f"{blocking.count:,}", *map(milliseconds, times)]))
    return Table(["stops", "mean", "median", "90th percentile", "99th percentile", "longest"], rows)


def _row(
    findings: Findings, item: ArmFindings, cells: Sequence[str], fractions: Sequence[float | None] = ()
) -> Row:
    style = arm_styles(other.arm for other in findings.arms)[item.arm]
    return Row(item.title, style.colour, item.arm == LEAD, cells, fractions)


def _setting(setting: Mapping[str, float]) -> str:
    parts = [f"{name.replace('_', ' ')} {plain(value)}" for name, value in setting.items()]
    return ", ".join(parts) or MISSING
