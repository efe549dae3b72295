"""The outcome of each request of a load test, as values. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.workload.arrivals import Arrival


class Fate(enum.StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The server said that it would not: 429 or 503."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that is over.

    Attributes:
        sent_s: When it was sent, `time.perf_counter`.
        ended_s: When it was over.
        reason: Why it was not answered, such as "429 deadline_infeasible"; empty if it was.
        ttft_s: From sending to the first token; None if there was none.
        tpot_s: Mean time per token after the first; None with fewer than two.
        output_tokens: Tokens that came, as the server counts them.
        said: The message of its error, if it sent one.
    """

    fate: Fate
    sent_s: float
    ended_s: float
    reason: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    said: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that was offered, and its answer.

    Attributes:
        late_s: How much later than its arrival it was sent.
    """

    arrival: Arrival
    answer: Answer
    late_s: float

    @property
    def is_met(self) -> bool:
        """Whether it was answered, and by its objective if it has one."""
        answer, due_s = self.answer, self.arrival.ttft_s
        if answer.fate is not Fate.ANSWERED or answer.ttft_s is None:
            return False
        return due_s is None or answer.ttft_s <= due_s


@dataclass(frozen=True, slots=True)
class Offered:
    """A run that is over.

    Attributes:
        ended: In order of arrival.
        wall_s: From the start until the last request was over.
        unsent: Requests that were not sent any more, as too many had missed by then.
    """

    ended: Sequence[Ended]
    wall_s: float
    unsent: int = 0
