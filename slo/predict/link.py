"""How fast KV cache moves from prefill to decode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What moves KV cache into one decode replica.

    Attributes:
        bytes_ps: Bytes per second, infinite for no limit.
        latency_s: From the last byte sent to the news of it; transfers do not wait for each other's.
    """

    bytes_ps: float = 25e9
    latency_s: float = 0.002

    def alone_s(self, size_bytes: float) -> float:
        """Seconds of a transfer that waits for no other."""
        return size_bytes / self.bytes_ps + self.latency_s


INSTANT_LINK = Link(float("inf"), 0.0)
"""Takes no time."""
