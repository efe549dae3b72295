"""`slackserve bench`."""

from __future__ import annotations

from typing import Any


class BenchError(RuntimeError):
    """A load test cannot be run as asked; the message says why and what to do."""


class SearchEndedError(BenchError):
    """A search has ended before it found anything; the message says why.

    Attributes:
        found: What was measured until then, as JSON.
    """

    def __init__(self, why: BenchError, found: dict[str, Any]) -> None:
        super().__init__(str(why))
        self.found = {**found, "error": str(why)}
