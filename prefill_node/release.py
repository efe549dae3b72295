"""How a prefill replica tells its engine that nobody wants a job any more.

A release travels as the name of a request in vLLM's channel for aborts, the only one there is. vLLM takes
each abort in twice, in order with the requests that come and as a step ends, when it may meet a prefill of
the same job that was begun after it. So a release says which were begun before it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

RELEASE_PREFIX: Final = "slackserve-release:"
"""The names of requests begin otherwise."""


class Release(NamedTuple):
    """Drop the prefill of a job, whether it still runs or waits to be pulled.

    Attributes:
        job: What the engine knows it by.
        begun: Prefills of all jobs that the replica had begun by then; a later one is not meant.
    """

    job: str
    begun: int

    def encode(self) -> str:
        """The name to abort."""
        return f"{RELEASE_PREFIX}{self.begun}:{self.job}"

    @staticmethod
    def of(name: str) -> Release | None:
        """What `encode` wrote; None for the name of a request."""
        if not name.startswith(RELEASE_PREFIX):
            return None
        begun, _, job = name.removeprefix(RELEASE_PREFIX).partition(":")
        return Release(job, int(begun))
