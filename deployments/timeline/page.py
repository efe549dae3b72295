"""The page that `slackserve timeline` writes: who ran, waited and made way for whom, by prefill replica.

Owns which requests are shown. The picture is the simulator's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from prefill_node.replica.job_history import JobState, PastJob, ReplicaPast, Stretch
from simulator.findings import Life, Span, State
from simulator.report.page import picture
from simulator.report.plots import Plot
from simulator.report.timeline import LifeRows, Window, lives_figure
from simulator.report.wording import number
from slo.request import JobId

MOST_ROWS: Final = 40
"""Requests in the picture of one replica."""
MOST_STOPS: Final = 100
"""Suspensions in its table; the latest are shown."""
_CAPTION: Final = (
    "Each row is a request, from its arrival at the replica to the end of its prefill; solid is running, "
    "hatched is suspended, a coloured thin line is waiting. A cross is a deadline that is missed, and a red "
    "line how late the prefill is. The deadline is the objective for the first token less what is left to do "
    "behind the prefill."
)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a replica remembers, and when it said so, from which its times count."""

    past: ReplicaPast
    at: datetime


@dataclass(frozen=True, slots=True)
class ShownStop:
    """A suspension, in words; times in seconds before now."""

    ago_s: str
    who: str
    for_whom: str
    reason: str
    suspended_ms: str
    checkpoint: str


def html(
    model: str,
    asked_at: datetime,
    last_s: float,
    answers: Mapping[str, Heard | None],
    tiers: Sequence[str],
) -> str:
    """The page.

    Args:
        model: What is served.
        asked_at: When the replicas were asked.
        last_s: How far back they were asked.
        answers: By replica; None for one that did not answer.
        tiers: The most valuable first; their colours go by this order.
    """
    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader("deployments.timeline", "."), PackageLoader("simulator.report", ".")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("timeline.html").render(
        model=model,
        begun_at=f"{asked_at - timedelta(seconds=last_s):%H:%M:%S}",
        asked_at=f"{asked_at:%Y-%m-%d %H:%M:%S}",
        replicas=[_replica(name, heard, last_s, tiers) for name, heard in answers.items()],
    )


def _replica(name: str, heard: Heard | None, last_s: float, tiers: Sequence[str]) -> dict[str, Any]:
    if heard is None or not heard.past.jobs:
        return {"name": name, "answers": heard is not None, "picture": None}
    past = heard.past
    chosen = _shown(past.jobs)
    # The picture begins with the first request in it: what is empty says nothing.
    start_s = max(past.since_s, chosen[0].arrived_s)
    window = Window(start_s, 0.0)
    lives = [_life(*job) for job in enumerate(chosen)]
    panel = LifeRows(f"{len(past.jobs)} requests", lives, len(past.jobs) - len(chosen))
    kinds = list(dict.fromkeys([*tiers, *(job.tier for job in past.jobs)]))
    label = f"seconds after {heard.at + timedelta(seconds=start_s):%H:%M:%S}"
    draw = partial(_draw, panel, window, kinds, label)
    stops = list(_stops(past.jobs))
    return {
        "name": name,
        "answers": True,
        "picture": picture(Plot(f"timeline-{name}", f"Prefill replica {name}", _CAPTION, draw)),
        "requests": len(past.jobs),
        "forgotten_s": number(-past.since_s) if past.since_s > -last_s else None,
        "stops": stops[-MOST_STOPS:],
        "all_stops": len(stops),
    }


def _draw(panel: LifeRows, window: Window, kinds: Sequence[str], label: str, width_in: float) -> Any:
    return lives_figure([panel], window, kinds, width_in, label)


def _shown(jobs: Sequence[PastJob]) -> list[PastJob]:
    """Those that were suspended or that others made way for come first, then the latest; by arrival."""
    beneficiaries = {stretch.preempted_by for job in jobs for stretch in job.stretches}

    def value(job: PastJob) -> tuple[bool, float]:
        is_part = any(stretch.state is JobState.SUSPENDED for stretch in job.stretches)
        return is_part or job.job_id in beneficiaries, job.arrived_s

    return sorted(sorted(jobs, key=value, reverse=True)[:MOST_ROWS], key=lambda job: job.arrived_s)


def _life(row: int, job: PastJob) -> Life:
    spans = tuple(Span(State(stretch.state), stretch.start_s, stretch.end_s) for stretch in job.stretches)
    return Life(row, job.tier, job.tokens, job.arrived_s, job.due_s, job.ended_s, spans)


def _stops(jobs: Sequence[PastJob]) -> Iterator[ShownStop]:
    """All suspensions, the earliest first."""
    by_id = {job.job_id: job for job in jobs}
    suspensions = [
        (stretch, job) for job in jobs for stretch in job.stretches if stretch.state is JobState.SUSPENDED
    ]
    for stretch, job in sorted(suspensions, key=lambda each: each[0].start_s):
        yield _stop(stretch, job, by_id.get(JobId(stretch.preempted_by)))


def _stop(stretch: Stretch, job: PastJob, beneficiary: PastJob | None) -> ShownStop:
    return ShownStop(
        ago_s=number(-stretch.start_s),
        who=_named(job),
        for_whom=stretch.preempted_by if beneficiary is None else _named(beneficiary),
        reason=stretch.reason,
        suspended_ms=number((stretch.end_s - stretch.start_s) * 1e3),
        checkpoint=number(stretch.checkpoint_bytes / 1024),
    )


def _named(job: PastJob) -> str:
    return f"{job.tier}, {job.tokens:,} tokens"
