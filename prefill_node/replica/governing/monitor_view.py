"""What a prefill replica tells the cluster's monitor about its work.

Pure: reads the governor's knowledge, decides nothing.
"""

from __future__ import annotations

from prefill_node.board.messages import SchedulerView
from prefill_node.replica.governing.governor import Governor
from slo.monitor.directives import ReplicaSeen, StepSeen, WaiterSeen
from slo.preemption.types import KeepReason
from slo.queue.slack import NO_DEADLINE, slack_s
from slo.request import JobId, ReplicaId


def replica_seen(
    replica_id: ReplicaId,
    governor: Governor,
    view: SchedulerView | None,
    reached: tuple[int, int],
    kept: KeepReason | None,
    now_s: float,
) -> ReplicaSeen:
    """The running step, and everybody who waits with their slack.

    `view`, `reached` and the time are as for `Governor.decide`; `kept` is why the governor let the running
    step go on.
    """
    if view is None:
        return ReplicaSeen(replica_id, None, ())
    accepted = governor.ledger.accepted
    waiting = tuple(
        WaiterSeen(
            prefill.job_id,
            prefill.tier,
            None
            if prefill.deadline_s == NO_DEADLINE
            else slack_s(prefill.deadline_s, now_s, prefill.remaining_s),
        )
        for prefill in governor.waiting(view, now_s)
    )
    if view.step is None:
        return ReplicaSeen(replica_id, None, waiting)
    step = StepSeen(
        step_id=view.step.step_id,
        tiers=tuple(accepted[JobId(job)].tier for job in view.step.jobs if job in accepted),
        remaining_s=governor.remaining_s(view.step, reached),
        preemptible_in_s=governor.preemptible_in_s(view, reached, now_s),
        kept=kept,
    )
    return ReplicaSeen(replica_id, step, waiting)
