"""A place in the prefill tier, and the replica that lives there until it dies.

Stands in for the shell of a prefill replica (`prefill_node.replica.server`): it takes requests, reports to
the router, and keeps the KV of what it has prefilled until somebody has pulled it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from prefill_node.replica.governing.snapshot import load
from simulator.fleet.reporting import VirtualReporter
from simulator.replica.hardware import ReplicaModel
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.replica.replica import VirtualReplica
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import PrefillReported
from slo.request import JobId, ReplicaId


class ReplicaLifetime(EventLoop):
    """The time of one life of a replica: after its end nothing happens that was asked for before."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self.is_over = False
        self.now_s = loop.now_s
        self._loop = loop

    def call_at(self, at_s: float, function: Callable[..., None], *arguments: object) -> None:
        """Call a function at a time, if the life still goes on then."""
        self._loop.call_at(at_s, self._happen, function, arguments)

    def catch_up(self) -> None:
        """It is as late as everywhere; to be called before the replica is."""
        self.now_s = self._loop.now_s

    def _happen(self, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not self.is_over:
            self.now_s = self._loop.now_s
            function(*arguments)


class PrefillSite:
    """One prefill replica from its start to its death.

    Args:
        replica_id: Its name; another life has another.
        build: Makes the replica, given what to call for every request whose prefill is done.
        prefilled: Called for every such request; its KV stays here until `release`.
        handoff_s: What it tells the router to expect between the end of prefill and the first token.

    Attributes:
        here: Requests that it has accepted and whose KV has not left, by request id.
        expected: Requests that are on their way here.
        is_draining: Whether it takes no more, and says so.
        stranded: Requests that were on it when it died, or have come since, and were not placed again yet.
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        life: ReplicaLifetime,
        build: Callable[[ReplicaLifetime, Callable[[Job], None]], ReplicaModel],
        prefilled: Callable[[PrefillSite, Job], None],
        handoff_s: float,
    ) -> None:
        self.replica_id = replica_id
        self.here: dict[str, Job] = {}
        self.is_noticed = False
        self.is_draining = False
        self.expected = 0
        self.stranded: list[Job] = []
        self.replica = build(life, self._done)
        self._life = life
        self._prefilled = prefilled
        self._handoff_s = handoff_s
        self.reporter = VirtualReporter(life, self.report)
        self._hits: list[tuple[JobId, int]] = []

    @property
    def is_alive(self) -> bool:
        """Whether it has not died."""
        return not self._life.is_over

    @property
    def informs(self) -> bool:
        """Whether it can say what it has to do: it runs our code."""
        return isinstance(self.replica, VirtualReplica)

    def arrive(self, job: Job) -> None:
        """Take a request."""
        self._life.catch_up()
        self.here[job.request_id] = job
        self.replica.arrive(job)
        self.reporter.changed()

    @property
    def outstanding(self) -> int:
        """Prefills that it has accepted and not finished."""
        assert isinstance(self.replica, VirtualReplica)
        return len(self.replica.ledger.accepted)

    def drain(self) -> None:
        """Finish what is here, and say that no more is wanted."""
        self.is_draining = True
        self.reporter.changed()

    def release(self, job: Job) -> None:
        """The KV of a prefilled request has left."""
        self._life.catch_up()
        self.here.pop(job.request_id, None)
        self.replica.release(job)

    def die(self) -> list[Job]:
        """End this life; returns the requests that were here."""
        self._life.is_over = True
        stranded = [*self.here.values()]
        self.here.clear()
        return stranded

    def report(self) -> PrefillReported:
        """What it has to do, as `prefill_node.replica.server` tells the router."""
        replica = self.replica
        assert isinstance(replica, VirtualReplica)
        work = load(replica.governor, replica.engine.view(), replica.reached(), self._life.now_s)
        hits, self._hits = tuple(self._hits), []
        return PrefillReported(
            replica_id=self.replica_id,
            predictor=replace(replica.ledger.predictor, handoff_s=self._handoff_s),
            **work._asdict(),
            kv_usage=replica.engine.kv_usage,
            ended=replica.ledger.take_ended(),
            kv_tokens=replica.engine.kv_tokens,
            hits=hits,
            draining=self.is_draining,
        )

    def first_report(self, predictor: PrefillPredictor) -> PrefillReported:
        """What is known of a replica that does not report: how fast it is."""
        return PrefillReported(self.replica_id, replace(predictor, handoff_s=self._handoff_s), (), None, 0.0)

    def _done(self, job: Job) -> None:
        self._hits.append((job.job_id, job.hit_tokens))
        self._prefilled(self, job)
        self.reporter.changed()
