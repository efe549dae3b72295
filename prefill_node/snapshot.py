"""What a prefill replica has to do, for the router and for people.

Pure: reads the governor's knowledge, decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slo.reports import OutstandingJob
from slo.request import JobId
from slo.slack import NO_DEADLINE, slack_s

if TYPE_CHECKING:
    from prefill_node.governor import Governor
    from prefill_node.ledger import Accepted
    from prefill_node.views import SchedulerView, StepView


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do.

    Attributes:
        jobs: Each accepted prefill with the tokens still to compute. The running pass is told as the whole
            of `running`; the others in it have none left.
        running: One of the jobs in the running pass.
        running_for_s: How much of that pass's predicted time is behind it.
        yields_in_s: How soon the pass would make way; None when it would not.
    """

    jobs: tuple[OutstandingJob, ...]
    running: JobId | None
    running_for_s: float
    yields_in_s: float | None


def load(governor: Governor, view: SchedulerView | None, reached: tuple[int, int], now_s: float) -> Load:
    """What the replica has to do, progress credited."""
    accepted = governor.ledger.accepted
    left = {job.job_id: job.tokens for job in accepted.values()}
    if view is None:
        return Load(_outstanding(accepted, left, now_s), None, 0.0, None)
    for job_id, account in view.accounts.items():
        if (job := accepted.get(JobId(job_id))) is not None:
            left[job.job_id] = max(0, job.tokens - account.computed_tokens)
    for step in view.suspended:
        members = [JobId(job) for job in step.jobs if job in accepted]
        if members:
            behind = max(0, sum(left[job] for job in members) - step.tokens)
            left |= dict.fromkeys(members, 0)
            left[members[0]] = behind + math.ceil(step.tokens * (1 - step.done))
    running = [] if view.step is None else [JobId(job) for job in view.step.jobs if job in accepted]
    if view.step is None or not running:
        return Load(_outstanding(accepted, left, now_s), None, 0.0, None)
    behind = sum(left[job] for job in running if job in view.accounts)
    left |= dict.fromkeys(running, 0)
    left[running[0]] = view.step.tokens + behind
    total_s = governor.ledger.predictor.prefill_s(view.step.tokens)
    return Load(
        _outstanding(accepted, left, now_s),
        running[0],
        total_s - governor.remaining_s(view.step, reached),
        governor.yields_in_s(view, reached, now_s),
    )


def snapshot(
    governor: Governor, view: SchedulerView | None, reached: tuple[int, int], now_s: float
) -> dict[str, Any]:
    """The running step with its progress, the queue with its slack, and what is suspended."""
    if view is None:
        return {"preemptible": False, "step": None, "queue": [], "suspended": []}
    return {
        "preemptible": governor.is_on,
        "step": None if view.step is None else _step(governor, view.step, reached, now_s),
        "queue": [
            {
                **_job(governor, job.job_id, now_s),
                "slack_s": _finite(slack_s(job.deadline_s, now_s, job.remaining_s)),
            }
            for job in governor.waiting(view, now_s)
        ],
        "suspended": [
            {
                "jobs": [_job(governor, job, now_s) for job in step.jobs],
                "progress": step.done,
                "tokens": step.tokens,
                "bytes": step.checkpoint_bytes,
                "for_s": now_s - step.since_s,
                "yielded_to": step.yielded_to,
            }
            for step in view.suspended
        ],
    }


def _step(governor: Governor, step: StepView, reached: tuple[int, int], now_s: float) -> dict[str, Any]:
    return {
        "step_id": step.step_id,
        "jobs": [_job(governor, job, now_s) for job in step.jobs],
        "tokens": step.tokens,
        "progress": governor.progress(step, reached),
        "running_for_s": now_s - step.started_s,
        "remaining_s": governor.remaining_s(step, reached),
    }


def _job(governor: Governor, job_id: str, now_s: float) -> dict[str, Any]:
    job = governor.ledger.accepted.get(JobId(job_id))
    if job is None:
        return {"job": job_id, "tier": "", "tokens": 0, "budget_s": None}
    return {
        "job": job_id,
        "tier": job.tier.value,
        "tokens": job.tokens,
        "budget_s": _finite(job.deadline_s - now_s),
    }


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _outstanding(
    accepted: dict[JobId, Accepted], left: dict[JobId, int], now_s: float
) -> tuple[OutstandingJob, ...]:
    return tuple(
        OutstandingJob(
            job.job_id,
            job.tier,
            left[job.job_id],
            None if job.deadline_s == NO_DEADLINE else job.deadline_s - now_s,
        )
        for job in accepted.values()
    )
