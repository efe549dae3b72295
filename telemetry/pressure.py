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
    SWAP_USED,
    SWAPPED_BLOCKS,
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
    SWAPPED_BLOCKS,
    SWAP_USED,
)


class PressureFigures(msgspec.Struct):
    """What has happened since the figures before these.

    Attributes:
        preempted: (tier, reason, what became of its KV) of each stream whose memory was taken, or that was
            dropped.
        restored: (tier, seconds without memory) of each that has its KV again.
        recomputed_tokens: Tokens that were computed again for that.
        skipped: Tokens that were left out of steps for the sake of others, one a stream and step.
        swapped_out: Blocks that were moved to host memory.
        swapped_back: And back.
        swap_used: Part of the host's pool in use; None when nobody asked for it, or there is none.
        peak: The predicted peak, as a part of the pool; None when nobody asked for it.
        reserve: What is kept for the top tier, as a part of the pool.
        load: What the router is told of the memory.
    """

    preempted: list[tuple[str, str, str]] = []
    restored: list[tuple[str, float]] = []
    recomputed_tokens: int = 0
    skipped: int = 0
    swapped_out: int = 0
    swapped_back: int = 0
    swap_used: float | None = None
    peak: float | None = None
    reserve: float | None = None
    load: DecodeLoad | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return self == PressureFigures()

    def record(self, instruments: Instruments) -> None:
        """Count what has happened."""
        for tier, reason, by in self.preempted:
            instruments.count(STREAMS_PREEMPTED, tier=tier, reason=reason, by=by)
        for tier, seconds in self.restored:
            instruments.observe(STREAM_RESTORE, seconds, tier=tier)
        if self.recomputed_tokens:
            instruments.count(STREAM_RECOMPUTED, self.recomputed_tokens)
        if self.skipped:
            instruments.count(STREAM_SKIPS, self.skipped)
        for direction, blocks in (("out", self.swapped_out), ("back", self.swapped_back)):
            if blocks:
                instruments.count(SWAPPED_BLOCKS, blocks, direction=direction)
        self.show(instruments)

    def show(self, instruments: Instruments) -> None:
        """Set the gauges."""
        if self.swap_used is not None:
            instruments.set(SWAP_USED, self.swap_used)
        if self.peak is not None:
            instruments.set(DECODE_PEAK, self.peak)
        if self.reserve is not None:
            instruments.set(DECODE_RESERVE, self.reserve)
