"""What a decode engine has done for lack of memory or pace, on its way from its scheduler to the metrics.

Travels with vLLM's statistics of a step, among those of the KV connector: the only ones that are a mapping.
"""

from __future__ import annotations

from typing import Final

import msgspec

PRESSURE_KEY: Final = "slackserve_pressure"
"""Where it is among the connector's statistics."""


class PressureFigures(msgspec.Struct):
    """What has happened since the figures before these.

    Attributes:
        preempted: (tier, reason) of each stream whose memory was taken.
        restored: (tier, seconds without memory) of each that has computed it again.
        recomputed_tokens: Tokens that were computed again for that.
        skipped: Tokens that were left out of steps for the sake of others, one a stream and step.
        peak: The predicted peak, as a part of the pool; None when nobody asked for it.
        reserve: What is kept for the top tier, as a part of the pool.
    """

    preempted: list[tuple[str, str]] = []
    restored: list[tuple[str, float]] = []
    recomputed_tokens: int = 0
    skipped: int = 0
    peak: float | None = None
    reserve: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return self == PressureFigures()
