"""What a decode engine has done for lack of memory or pace, on its way from its scheduler to the metrics.

Travels with vLLM's statistics of a step, among those of the KV connector: the only ones that are a mapping.
"""

from __future__ import annotations

from typing import Final

import msgspec

from slo.decode.headroom import DecodeLoad
from telemetry.catalogue import (
    DECODE_PEAK,
    DECODE_RESERVE,
    STREAM_RECOMPUTED,
    STREAM_RESTORE,
    STREAM_SKIPS,
    STREAMS_PREEMPTED,
)
from telemetry.instruments import Instruments

PRESSURE_KEY: Final = "slackserve_pressure"
"""Where it is among the connector's statistics."""
PRESSURE_METRICS: Final = (
    DECODE_PEAK,
    STREAMS_PREEMPTED,
    STREAM_RECOMPUTED,
    DECODE_RESERVE,
    STREAM_RESTORE,
    STREAM_SKIPS,
)


class PressureFigures(msgspec.Struct):
    """What has happened since the figures before these.

    Attributes:
        preempted: (tier, reason) of each stream whose memory was taken.
        restored: (tier, seconds without memory) of each that has computed it again.
        recomputed_tokens: Tokens that were computed again for that.
        skipped: Tokens that were left out of steps for the sake of others, one a stream and step.
        peak: The predicted peak, as a part of the pool; None when nobody asked for it.
        reserve: What is kept for the top tier, as a part of the pool.
        load: What the router is told of the memory.
    """

    preempted: list[tuple[str, str]] = []
    restored: list[tuple[str, float]] = []
    recomputed_tokens: int = 0
    skipped: int = 0
    peak: float | None = None
    reserve: float | None = None
    load: DecodeLoad | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return self == PressureFigures()

    def record(self, instruments: Instruments) -> None:
        """Count it."""
        for tier, reason in self.preempted:
            instruments.count(STREAMS_PREEMPTED, tier=tier, reason=reason)
        for tier, seconds in self.restored:
            instruments.observe(STREAM_RESTORE, seconds, tier=tier)
        if self.recomputed_tokens:
            instruments.count(STREAM_RECOMPUTED, self.recomputed_tokens)
        if self.skipped:
            instruments.count(STREAM_SKIPS, self.skipped)
        if self.peak is not None:
            instruments.set(DECODE_PEAK, self.peak)
        if self.reserve is not None:
            instruments.set(DECODE_RESERVE, self.reserve)
