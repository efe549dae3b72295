"""What a prefill replica tells the cluster's monitor about its work.

Pure: reads the governor's knowledge, decides nothing.
"""

from __future__ import annotations

from prefill_node.board.messages import Reached, SchedulerView
from prefill_node.replica.governing.governor import Governor
from slo.monitor.directives import ReplicaSeen, StepSeen, WaiterSeen, first_of_each
from slo.preemption.types import KeepReason
from slo.queue.slack import slack_s
from slo.request import JobId, ReplicaId


def replica_seen(
    replica_id: ReplicaId,
    governor: Governor,
    view: SchedulerView | None,
    reached: Reached,
    kept: KeepReason | None,
    now_s: float,
) -> ReplicaSeen:
    """The running step, and the few that wait for whom the monitor may have it stopped.

    `view`, `reached` and the time are as for `Governor.decide`; `kept` is why the governor let the running
    step go on. A report does not grow with the queue.
    """
    if view is None or view.step is None:
        return ReplicaSeen(replica_id, None, ())
    accepted = governor.ledger.accepted
    step = StepSeen(
        step_id=view.step.step_id,
        tiers=tuple(accepted[JobId(job)].tier for job in view.step.jobs if job in accepted),
        remaining_s=governor.remaining_s(view.step, reached),
        preemptible_in_s=governor.preemptible_in_s(view, reached, now_s),
        kept=kept,
    )
    if not step.may_be_stopped:
        return ReplicaSeen(replica_id, step, ())
    made_late = (
        WaiterSeen(prefill.job_id, prefill.tier, slack)
        for prefill in governor.prefills(view, now_s)
        if step.makes_late(prefill.tier, slack := slack_s(prefill.deadline_s, now_s, prefill.remaining_s))
    )
    return ReplicaSeen(replica_id, step, first_of_each(made_late))
