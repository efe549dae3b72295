"""What a prefill replica has to do, for the router and for people.

Pure: reads the governor's knowledge, decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from prefill_node.board.messages import Reached, SchedulerView, StepView, SuspendedView
from prefill_node.replica.governing.governor import Governor
from prefill_node.replica.governing.ledger import Accepted
from slo.queue.prefill import Prefill
from slo.queue.slack import NO_DEADLINE, slack_s
from slo.reports import OutstandingJob
from slo.request import JobId, job_of


class ReplicaLoad(NamedTuple):
    """What a replica has to do.

    Attributes:
        jobs: Each accepted prefill with the tokens still to compute, in the order in which they run, and
            behind them those that wait for a place. The running pass is told as the whole of `running`; the
            others in it have none left.
        running: One of the jobs in the running pass.
        running_for_s: How much of that pass's predicted time is behind it.
        preemptible_in_s: How soon the pass would make way for somebody more urgent: by a stop, or by its end
            where more of its prompts lies behind it; None when it would not.
    """

    jobs: tuple[OutstandingJob, ...]
    running: JobId | None
    running_for_s: float
    preemptible_in_s: float | None


def load(governor: Governor, view: SchedulerView | None, reached: Reached, now_s: float) -> ReplicaLoad:
    """What the replica has to do, progress credited."""
    view = view or SchedulerView()
    accepted = governor.ledger.accepted
    left: dict[JobId, tuple[int, float]] = {}
    running = () if view.step is None else _known(governor, view.step.members)
    if view.step is not None and running:
        remaining_s = governor.remaining_s(view.step, reached)
        behind_s = sum(member.remaining_s for member in running)
        _stand_for_all(left, running, view.step.tokens + view.step.behind_tokens, remaining_s + behind_s)
    waiting: dict[JobId, tuple[int, float]] = {
        item.prefill.job_id: (item.tokens, item.prefill.work_s) for item in view.queue
    }
    for job in governor.fresh(view):
        waiting[job.job_id] = _whole(governor, job)
    steps: dict[JobId, SuspendedView] = {}
    for step in view.suspended:
        steps.update((member.job_id, step) for member in step.members)
    for prefill in governor.waiting(view, now_s):
        if (suspended := steps.get(prefill.job_id)) is None:
            left[prefill.job_id] = waiting[prefill.job_id]
        else:
            tokens = math.ceil(suspended.tokens * (1 - suspended.done)) + suspended.behind_tokens
            _stand_for_all(left, _known(governor, suspended.members), tokens, prefill.remaining_s)
    left |= {job_id: (0, 0.0) for job_id in accepted if job_id not in left}
    behind = governor.ledger.without_place
    jobs = _outstanding(accepted, left, now_s)
    jobs += _outstanding(behind, {job_id: _whole(governor, job) for job_id, job in behind.items()}, now_s)
    if view.step is None or not running:
        return ReplicaLoad(jobs, None, 0.0, None)
    preemptible_in_s = governor.preemptible_in_s(view, reached, now_s)
    if behind_s:
        # The queue is ordered anew before the next chunk.
        preemptible_in_s = min(math.inf if preemptible_in_s is None else preemptible_in_s, remaining_s)
    running_for_s = governor.total_s(view.step) - remaining_s
    return ReplicaLoad(jobs, job_of(running[0].job_id), running_for_s, preemptible_in_s)


def snapshot(
    governor: Governor, view: SchedulerView | None, reached: Reached, now_s: float
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


def _step(governor: Governor, step: StepView, reached: Reached, now_s: float) -> dict[str, Any]:
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


def _known(governor: Governor, members: Sequence[Prefill]) -> tuple[Prefill, ...]:
    """The members of a step whose clients are still there."""
    return tuple([member for member in members if member.job_id in governor.ledger.accepted])


def _whole(governor: Governor, job: Accepted) -> tuple[int, float]:
    """Tokens and seconds of a job of which nothing is computed."""
    tokens, context = job.left(0)
    return tokens, governor.ledger.predictor.work_s(tokens, context)


def _stand_for_all(
    left: dict[JobId, tuple[int, float]], members: Sequence[Prefill], tokens: int, seconds: float
) -> None:
    """Tell a step, and what is behind it, as the first of its jobs; the others have nothing to go."""
    left |= {member.job_id: (0, 0.0) for member in members}
    left[members[0].job_id] = tokens, seconds


def _outstanding(
    accepted: dict[JobId, Accepted], left: dict[JobId, tuple[int, float]], now_s: float
) -> tuple[OutstandingJob, ...]:
    """`left` is the tokens and the seconds that each job has to go, in the order in which they run."""
    return tuple(
        [
            OutstandingJob(
                job_of(job.job_id),
                job.tier,
                tokens,
                None if job.deadline_s == NO_DEADLINE else job.deadline_s - now_s,
                seconds,
            )
            for job_id, (tokens, seconds) in left.items()
            if (job := accepted.get(job_id)) is not None
        ]
    )
