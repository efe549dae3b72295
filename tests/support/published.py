"""What an engine's scheduler publishes, from jobs, without an engine."""

from typing import NamedTuple

import msgspec

from prefill_node.board.messages import Queued, SchedulerView, StepView, SuspendedView
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.prefill import Prefill
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId
from slo.tiers import DEFAULT_TIERS

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0, handoff_s=0.05)


class Account(NamedTuple):
    """How often a job was stopped, its closed suspensions, and its tokens that are computed or being so."""

    preemptions: int = 0
    suspended_s: float = 0.0
    computed_tokens: int = 0


class Engine:
    """Knows the jobs that were accepted last under each name, and tells what its scheduler would publish."""

    def __init__(self):
        self.jobs = {}

    def knows(self, job):
        """A job was accepted."""
        self.jobs[job.job_id] = job
        return job

    def view(self, step=None, *stopped, done=(), fairness=None, predictor=LINE, **accounts):
        """The view of a step, stopped steps, and jobs with an account that are in neither."""
        elsewhere = {name for one in (step, *stopped) if one is not None for name in one.jobs}
        return SchedulerView(
            step and self._running(step, accounts, predictor),
            tuple(
                self.queued(name, account, predictor)
                for name, account in accounts.items()
                if name not in elsewhere
            ),
            tuple(self._stopped(one, accounts, predictor) for one in stopped),
            done,
            fairness,
        )

    def queued(self, name, account=None, predictor=LINE):
        """A job that the engine has and that waits."""
        account = account or Account()
        tokens, context = self.jobs[name].left(account.computed_tokens)
        prefill = self._prefill(name, predictor.prefill_s(max(1, tokens), context), account)
        return Queued(prefill, tokens, 0.0, 1, request=f"engine-{name}")

    def _running(self, step, accounts, predictor):
        behind = [self._behind(name, accounts.get(name, Account()).computed_tokens) for name in step.jobs]
        members = tuple(
            self._prefill(name, predictor.prefill_s(*left), accounts.get(name, Account()))
            for name, left in zip(step.jobs, behind, strict=True)
        )
        return msgspec.structs.replace(
            step, members=members, behind_tokens=sum(tokens for tokens, _ in behind)
        )

    def _stopped(self, stopped, accounts, predictor):
        step, pairs, deadline_s = stopped.step, stopped.pairs, -float("inf")
        behind = (0, 0)
        if len(step.jobs) == 1:
            [name] = step.jobs
            behind = self._behind(name, accounts.get(name, Account()).computed_tokens + step.tokens)
        remaining_s = predictor.pass_s(step.tokens, pairs) * (1 - step.done) + predictor.prefill_s(*behind)
        if (beneficiary := self.jobs.get(step.preempted_by)) is not None:
            deadline_s = beneficiary.deadline_s - predictor.prefill_s(beneficiary.tokens)
        return msgspec.structs.replace(
            step,
            members=tuple(
                self._prefill(name, remaining_s, accounts.get(name, Account())) for name in step.jobs
            ),
            behind_tokens=behind[0],
            protects_until_s=deadline_s,
        )

    def _behind(self, name, computed):
        job = self.jobs.get(name)
        return (0, 0) if job is None or not computed else (max(0, job.tokens - computed), computed)

    def _prefill(self, name, remaining_s, account):
        job = self.jobs.get(name)
        if job is None:
            return nobody(name, remaining_s)
        return Prefill(
            job.job_id,
            DEFAULT_TIERS[job.tier].weight,
            job.deadline_s,
            remaining_s,
            job.arrived_s,
            account.preemptions,
            account.suspended_s,
            tier=job.tier,
        )


class Stopped(NamedTuple):
    """A stopped step, and its attention."""

    step: SuspendedView
    pairs: float

    @property
    def jobs(self):
        """Its members."""
        return self.step.jobs


def nobody(name, remaining_s=0.0):
    """A prefill of which only the name is known."""
    return Prefill(JobId(name), 1.0, NO_DEADLINE, remaining_s, 0.0)


def running(*jobs, step_id=7, tokens=1000, from_boundary=0, started_s=0.0, stoppable=True, guard=0.0):
    """A running step; `Engine.view` completes its members."""
    members = tuple(nobody(name) for name in jobs)
    return StepView(step_id, members, tokens, 0.0, from_boundary, started_s, stoppable, guard)


def suspended(*jobs, tokens=1000, boundary=5, preempted_by="", since_s=0.0, pairs=0.0, kept_bytes=500):
    """A suspended step of a pass with ten boundaries; `Engine.view` completes its members."""
    members = tuple(nobody(name) for name in jobs)
    step = SuspendedView(members, tokens, boundary / 10, kept_bytes, since_s, preempted_by)
    return Stopped(step, pairs)
