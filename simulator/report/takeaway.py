"""What a comparison comes down to, in a few sentences made from its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulator.report.palette import LEAD, REFERENCE
from simulator.report.wording import MISSING, is_finite, level, milliseconds, percent, rate, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.findings import ArmFindings, Findings, Point

MAIN_LEVEL: Final = "0.90"


def goodput(item: ArmFindings, key: str = MAIN_LEVEL) -> float:
    """Requests per second; 0 where the level is never reached or was not looked for."""
    value = item.goodput_rps.get(key, 0.0)
    return value if is_finite(value) else 0.0


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
