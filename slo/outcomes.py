"""How a request ends.

Every request ends exactly once, in exactly one of these; the values label metrics. A request that was
refused before it was queued is `REJECTED` (malformed or unauthorised) or `SHED` (overload); one that was
queued and then given up by the server is `EVICTED`.
"""

from __future__ import annotations

import enum


class Outcome(enum.StrEnum):
    """The one way in which a request ended."""

    FINISHED = "finished"
    REJECTED = "rejected"
    SHED = "shed"
    EVICTED = "evicted"
    CANCELLED = "cancelled"
    FAILED = "failed"
