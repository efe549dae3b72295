"""Listens to a vLLM engine's own statistics: KV memory, pace, and finished KV transfers.

Owns the conversion of vLLM's per-step statistics, which vLLM does not promise to keep stable, into the
few numbers that SlackServe needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.v1.metrics.loggers import StatLoggerBase

from slo.decode.headroom import DecodeLoad, ToldStreams
from slo.reports import PACE_HOLDS_S
from telemetry.catalogue import KV_BYTES, KV_SECONDS, KV_TRANSFERS, KV_USAGE
from telemetry.pressure import PRESSURE_KEY, PressureFigures
from telemetry.pulls import PULLS_KEY

if TYPE_CHECKING:
    from telemetry.instruments import Instruments


_NEWEST: Final = 0.2
"""Weight of the newest step in the pace."""
_CALM_STEPS: Final = 64
"""After so many steps without a waiting request none whose memory was taken is computed anew any more."""


class EngineTap(StatLoggerBase):  # type: ignore[misc] # vLLM ships no types for it
    """Holds the latest KV use and pace of one engine and counts its KV transfers.

    Attributes:
        kv_usage: Fraction of its KV blocks in use.
        waiting: Requests for which it has no memory, or no place, yet.
        kv_tokens: Tokens that its KV memory holds; 0 when vLLM does not say.
        caches_prefixes: Whether it has a prefix cache.
        step_s: What a step takes of late; None before the second token of a first request.
        steps: How many steps have ended.
        load: What its streams hold and will hold; None when it does not say.

    Args:
        role: Of its replica.
        instruments: Where KV use and transfers are recorded.
        clock: Monotonic seconds.
    """

    METRICS = (KV_BYTES, KV_SECONDS, KV_TRANSFERS, KV_USAGE)

    def __init__(
        self, role: str, instruments: Instruments, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.kv_usage = 0.0
        self.waiting = 0
        self.kv_tokens = 0
        self.caches_prefixes = True
        self.step_s: float | None = None
        self.steps = 0
        self.load: DecodeLoad | None = None
        self._pressure: PressureFigures | None = None
        self._calm_steps = _CALM_STEPS
        self._ranks = 1
        self._step_tokens = 1.0
        """How many tokens a step brings to each stream of late."""
        self._is_timed = False
        """Whether a token was timed since the pace was told."""
        self._timed_at_s = -math.inf
        self._clock = clock
        self._role = role
        self._instruments = instruments

    def attach(self, engine: Any) -> None:
        """Listen to a started Ray Serve LLM engine.

        Raises:
            RuntimeError: when the engine keeps no statistics.
        """
        manager = engine._engine_client.logger_manager  # noqa: SLF001 - no public way in
        if manager is None:
            msg = "the engine keeps no statistics; remove disable_log_stats from its engine arguments"
            raise RuntimeError(msg)
        manager.stat_loggers.append(self)
        config = engine._engine_client.vllm_config  # noqa: SLF001 - no public way in
        self._ranks = config.parallel_config.tensor_parallel_size
        cache = config.cache_config
        tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self.kv_tokens = int(min(tokens, cache.kv_cache_size_tokens or tokens))  # fewer, of several groups
        self.caches_prefixes = bool(cache.enable_prefix_caching)

    @property
    def recomputes(self) -> bool:
        """Whether a pass may compute the prompt of a request anew whose KV memory was taken."""
        return self._calm_steps < _CALM_STEPS

    @property
    def tpot_s(self) -> float | None:
        """Time per output token of late; None before the second token of a first request."""
        return None if self.step_s is None else self.step_s / self._step_tokens

    def newest_tpot_s(self) -> float | None:
        """The pace, to be told once: None when no token was timed since this was asked last."""
        is_timed, self._is_timed = self._is_timed, False
        return self.tpot_s if is_timed else None

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002 - vLLM's interface
        engine_idx: int = 0,  # noqa: ARG002 - vLLM's interface
    ) -> None:
        """Take one step's statistics, called by vLLM."""
        self.steps += 1
        if iteration_stats is not None:
            self._record_tokens(iteration_stats)
        if scheduler_stats is None:
            return
        self.waiting = scheduler_stats.num_waiting_reqs
        self._calm_steps = 0 if self.recomputes and self.waiting else self._calm_steps + 1
        self.kv_usage = float(scheduler_stats.kv_cache_usage)
        self._instruments.set(KV_USAGE, self.kv_usage, role=self._role)
        if scheduler_stats.kv_connector_stats:
            self._record_transfers(scheduler_stats.kv_connector_stats)
            if (figures := scheduler_stats.kv_connector_stats.get(PRESSURE_KEY)) is not None:
                self._record_pressure(msgspec.convert(figures, PressureFigures))

    def show(self) -> None:
        """Set the gauges again as the last step has left them: Ray forgets one that is not set for long."""
        self._instruments.set(KV_USAGE, self.kv_usage, role=self._role)
        if self._pressure is not None:
            self._pressure.show(self._instruments)

    def log_engine_initialized(self) -> None:
        """Nothing to say at start; part of vLLM's interface."""

    def _record_tokens(self, stats: Any) -> None:
        if stats.num_preempted_reqs:
            self._calm_steps = 0
        if not (latencies_s := stats.inter_token_latencies_iter):
            return
        # A stream that was without memory, or left out of steps, brings all of its pause.
        step_s, now_s = median(latencies_s), self._clock()
        # A stream begins with one token, may have several in a step with speculation, and none if it fails.
        tokens = stats.num_generation_tokens - len(stats.time_to_first_tokens_iter)
        tokens_each = max(1.0, tokens / len(latencies_s))
        if self.step_s is None or now_s - self._timed_at_s >= PACE_HOLDS_S:
            self.step_s, self._step_tokens = step_s, tokens_each
        self.step_s += _NEWEST * (step_s - self.step_s)
        self._step_tokens += _NEWEST * (tokens_each - self._step_tokens)
        self._is_timed, self._timed_at_s = True, now_s

    def _record_pressure(self, figures: PressureFigures) -> None:
        figures.record(self._instruments)
        if (load := figures.load) is not None:
            self.load = replace(load, streams=ToldStreams.of(load.streams))
        if figures.preempted:
            self._calm_steps = 0
        if figures.peak is not None:
            self._pressure = figures

    def _record_transfers(self, stats: dict[str, Any]) -> None:
        self._instruments.count(KV_BYTES, sum(stats.get("bytes_transferred", ())))
        for seconds in stats.get("transfer_duration", ()):
            self._instruments.observe(KV_SECONDS, seconds)
        self._instruments.count(KV_TRANSFERS, stats.get(PULLS_KEY, 0), result="done")
        # One rank alone may fail, and then no other tells of that transfer.
        for result, stat in (("failed", "num_failed_transfers"), ("expired", "num_kv_expired_reqs")):
            self._instruments.count(KV_TRANSFERS, -(-len(stats.get(stat, ())) // self._ranks), result=result)
