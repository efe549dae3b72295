"""What a prefill replica has to do, for the router and for people.

Pure: reads the governor's knowledge, decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slo.queue.slack import NO_DEADLINE, slack_s
from slo.reports import OutstandingJob
from slo.request import JobId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefill_node.board.messages import SchedulerView, StepView
    from prefill_node.replica.governing.governor import Governor
    from prefill_node.replica.governing.ledger import Accepted


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do.

    Attributes:
        jobs: Each accepted prefill with the tokens still to compute. The running pass is told as the whole
            of `running`; the others in it have none left.
        running: One of the jobs in the running pass.
        running_for_s: How much of that pass's predicted time is behind it.
        preemptible_in_s: How soon the pass would make way; None when it would not.
    """

    jobs: tuple[OutstandingJob, ...]
    running: JobId | None
    running_for_s: float
    preemptible_in_s: float | None


def load(governor: Governor, view: SchedulerView | None, reached: tuple[int, int], now_s: float) -> Load:
    """What the replica has to do, progress credited."""
    accepted = governor.ledger.accepted
    if view is None:
        left = {job.job_id: _waiting(governor, job, 0) for job in accepted.values()}
        return Load(_outstanding(accepted, left, now_s), None, 0.0, None)
    computed = {job_id: account.computed_tokens for job_id, account in view.accounts.items()}
    left = {job.job_id: _waiting(governor, job, computed.get(job.job_id, 0)) for job in accepted.values()}
    for step in view.suspended:
        jobs = [accepted[JobId(job)] for job in step.jobs if job in accepted]
        behind = (0, 0.0)
        if len(jobs) == 1:  # the only kind of step that is one chunk of a prompt
            behind = _behind(governor, jobs[0], computed.get(jobs[0].job_id, 0) + step.tokens)
        rest = 1 - step.done
        _stand_for_all(left, jobs, math.ceil(step.tokens * rest), governor.total_s(step) * rest, behind)
    jobs = [] if view.step is None else [accepted[JobId(job)] for job in view.step.jobs if job in accepted]
    if view.step is None or not jobs:
        return Load(_outstanding(accepted, left, now_s), None, 0.0, None)
    remaining_s = governor.remaining_s(view.step, reached)
    parts = [_behind(governor, job, computed.get(job.job_id, 0)) for job in jobs]
    behind = sum(tokens for tokens, _ in parts), sum(seconds for _, seconds in parts)
    _stand_for_all(left, jobs, view.step.tokens, remaining_s, behind)
    return Load(
        _outstanding(accepted, left, now_s),
        jobs[0].job_id,
        governor.total_s(view.step) - remaining_s,
        governor.preemptible_in_s(view, reached, now_s),
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
                "preempted_by": step.preempted_by,
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
        "tier": job.tier,
        "tokens": job.tokens,
        "budget_s": _finite(job.deadline_s - now_s),
    }


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _waiting(governor: Governor, job: Accepted, computed_tokens: int) -> tuple[int, float]:
    """Tokens and seconds that a job has to go."""
    tokens, context = job.left(computed_tokens)
    return tokens, governor.ledger.predictor.prefill_s(tokens, context)


def _behind(governor: Governor, job: Accepted, computed_tokens: int) -> tuple[int, float]:
    """The same behind so many tokens; nothing when nothing is known to be computed."""
    tokens = max(0, job.tokens - computed_tokens) if computed_tokens else 0
    return tokens, governor.behind_s(job, computed_tokens)


def _stand_for_all(
    left: dict[JobId, tuple[int, float]],
    jobs: Sequence[Accepted],
    tokens: int,
    seconds: float,
    behind: tuple[int, float],
) -> None:
    """Tell a step, and what is behind it, as the first of its jobs; the others have nothing to go."""
    left |= {job.job_id: (0, 0.0) for job in jobs}
    if jobs:
        left[jobs[0].job_id] = tokens + behind[0], seconds + behind[1]


def _outstanding(
    accepted: dict[JobId, Accepted], left: dict[JobId, tuple[int, float]], now_s: float
) -> tuple[OutstandingJob, ...]:
    """`left` is the tokens and the seconds that each job has to go."""
    return tuple(
        OutstandingJob(
            job.job_id,
            job.tier,
            left[job.job_id][0],
            None if job.deadline_s == NO_DEADLINE else job.deadline_s - now_s,
            left[job.job_id][1],
        )
        for job in accepted.values()
    )
