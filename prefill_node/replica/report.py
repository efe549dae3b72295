"""What a prefill replica tells the router: its load, and what it has learned since the last report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prefill_node.replica.governing.snapshot import load
from slo.reports import PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from telemetry.reporting.draining import is_draining

if TYPE_CHECKING:
    from prefill_node.board.events import Started
    from prefill_node.replica.governing.governor import Governor
    from prefill_node.replica.preemption_controller import Watch
    from slo.reports import Report
    from telemetry.engine_tap import EngineTap


class ReportBuilder:
    """Builds the reports of one replica.

    Args:
        replica_id: The replica.
        engine: Its engine.
        governor: Knows what it has to do.
        tap: Knows its KV memory.
    """

    def __init__(self, replica_id: ReplicaId, engine: Any, governor: Governor, tap: EngineTap) -> None:
        self.replica_id = replica_id
        self._engine = engine
        self._governor = governor
        self._tap = tap
        self._learned: list[tuple[int, int]] = []
        self._hits: list[tuple[JobId, int]] = []

    @property
    def is_dead(self) -> bool:
        """Whether the engine has died."""
        return bool(self._engine._engine_client.errored)  # noqa: SLF001 - no public way in

    def note_length(self, prompt_bytes: int, tokens: int) -> None:
        """The length of a prompt has become known."""
        self._learned.append((prompt_bytes, tokens))

    def note_hit(self, started: Started) -> None:
        """What the prefix cache held of a prompt has become known."""
        self._hits.append((JobId(started.job), started.cached_tokens))

    def build(self, watch: Watch) -> Report:
        """The next report."""
        if self.is_dead:
            return ReplicaGone(self.replica_id)
        watch.collect()
        learned, self._learned = tuple(self._learned), []
        hits, self._hits = tuple(self._hits), []
        view = watch.view() if watch.is_up else None
        work = load(self._governor, view, watch.reached(), time.monotonic())
        return PrefillReported(
            replica_id=self.replica_id,
            predictor=self._governor.ledger.predictor,
            jobs=work.jobs,
            running=work.running,
            running_for_s=work.running_for_s,
            preemptible_in_s=work.preemptible_in_s,
            kv_usage=self._tap.kv_usage,
            ended=self._governor.ledger.take_ended(),
            learned=learned,
            hits=hits,
            kv_tokens=self._tap.kv_tokens,
            draining=is_draining(),
        )
