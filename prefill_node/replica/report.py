"""What a prefill replica tells the router: its load, and what it has learned since the last report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from prefill_node.board.events import Started
from prefill_node.replica.governing.governor import Governor
from prefill_node.replica.governing.snapshot import load
from prefill_node.replica.preemption_controller import Watch
from slo.model_digest import UNTOLD, ModelDigest
from slo.monitor.messages import Role
from slo.reports import EngineEnd, PrefillReported, ReplicaGone, Report
from slo.request import JobId, ReplicaId, job_of
from telemetry.catalogue import PREFILL_OUTSTANDING
from telemetry.reporting.draining import is_draining

if TYPE_CHECKING:
    from engine_host.watchdog import EngineWatchdog
    from telemetry.engine_tap import EngineTap
    from telemetry.instruments import Instruments


_MOST_KEPT: Final = 16_384
"""Of each kind of news while the router does not listen; the oldest go first."""


class ReportBuilder:
    """Builds the reports of one replica; news stays in them until one was `delivered`.

    `instruments` must have `PREFILL_OUTSTANDING`: a gauge that is not set with every report is forgotten. The
    predictor of `governor` is still that of the configuration, or of the warm-up.

    Attributes:
        digest: Of the model that the replica serves.
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        engine: Any,
        governor: Governor,
        tap: EngineTap,
        instruments: Instruments,
        digest: ModelDigest = UNTOLD,
    ) -> None:
        self.replica_id = replica_id
        self._engine = engine
        self._governor = governor
        self._unlearned = governor.ledger.predictor
        self._tap = tap
        self._instruments = instruments
        self.digest = digest
        self._learned: list[tuple[str, int, int]] = []
        self._hits: list[tuple[JobId, int]] = []
        self._ended: list[JobId] = []
        self._news: tuple[list[Any], ...] = self._learned, self._hits, self._ended
        self._sent = [0, 0, 0]

    @property
    def is_dead(self) -> bool:
        """Whether the engine has died."""
        return bool(self._engine._engine_client.errored)  # noqa: SLF001 - no public way in

    def note_length(self, tenant: str, prompt_bytes: int, tokens: int) -> None:
        """The length of a prompt has become known."""
        self._learned.append((tenant, prompt_bytes, tokens))

    def note_hit(self, started: Started) -> None:
        """What the prefix cache held of a prompt has become known."""
        self._hits.append((job_of(JobId(started.job)), started.cached_tokens))

    def build(self, watch: Watch, watchdog: EngineWatchdog) -> Report:
        """The next report."""
        if self.is_dead:
            end = EngineEnd.VOTE_TIMEOUT if watch.has_vote_timeout() else watchdog.engine_end
            return ReplicaGone(self.replica_id, (Role.PREFILL, end))
        watch.collect()
        self._tap.show()
        self._instruments.set(PREFILL_OUTSTANDING, len(self._governor.ledger.accepted))
        self._ended += map(job_of, self._governor.ledger.take_ended())
        for news in self._news:
            del news[:-_MOST_KEPT]
        self._sent = [len(news) for news in self._news]
        reached, now_s = watch.reached(), time.monotonic()
        work = watch.told(lambda view: load(self._governor, view, reached, now_s))
        return PrefillReported(
            replica_id=self.replica_id,
            predictor=self._governor.ledger.predictor,
            **work._asdict(),
            kv_usage=self._tap.kv_usage,
            ended=tuple(self._ended),
            learned=tuple(self._learned),
            hits=tuple(self._hits),
            kv_tokens=self._tap.kv_tokens,
            draining=is_draining(),
            caches_prefixes=self._tap.caches_prefixes,
            digest=self.digest,
            unlearned=self._unlearned,
        )

    def delivered(self) -> None:
        """The router has heard the report that was built last."""
        for news, sent in zip(self._news, self._sent, strict=True):
            del news[:sent]
        self._sent = [0] * len(self._news)
