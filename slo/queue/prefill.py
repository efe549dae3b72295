"""The form in which all rules of queueing, preemption and placement see a prefill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from slo.request import JobId
from slo.tiers import SYSTEM, Tier

ROUNDED_TOKENS: Final = 128
"""A prefix cache of whole blocks may lack so many tokens of a prefix that it has: vLLM's largest block."""


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """A prefill that waits, runs or is suspended.

    Attributes:
        weight: The value of its being on time.
        deadline_s: When it must end; infinite for none.
        remaining_s: Predicted seconds of the work still to do; what is done does not count. A member of
            a step, running or suspended, has what is left of the step, since a forward pass ends for all,
            and of its prompt behind that.
        preemptions: How often it has been stopped.
        preemptions_before: Of these, how often before its chunk began.
        suspended_s: Of a step that runs or is suspended, the seconds that it has been suspended in total, an
            open suspension included; 0 of what waits between two chunks, or to start.
        preempted_by: The job that it was preempted for, as long as it `must_wait` for that one.
        tier: The class that it belongs to.
        idle_s: Of `remaining_s`, what it takes alone because no pass takes less, and prompts that share one
            with it take only once; 0 of what has started.
    """

    job_id: JobId
    weight: float
    deadline_s: float
    remaining_s: float
    arrived_s: float
    preemptions: int = 0
    suspended_s: float = 0.0
    preempted_by: JobId | None = None
    tier: Tier = SYSTEM
    idle_s: float = 0.0
    preemptions_before: int = 0

    @property
    def preemptions_in_chunk(self) -> int:
        """How often it has been stopped since its chunk began; what limits count."""
        return self.preemptions - self.preemptions_before

    @property
    def work_s(self) -> float:
        """What it adds to the time of others that it shares passes with, and that wait behind it."""
        return self.remaining_s - self.idle_s


def ends_s(prefills: Iterable[Prefill], start_s: float = 0.0) -> Iterator[float]:
    """When each ends, one behind the other from `start_s` on, where passes are shared."""
    worked_s, idle_s = start_s, 0.0
    for prefill in prefills:
        worked_s += prefill.work_s
        idle_s = max(idle_s, prefill.idle_s)
        yield worked_s + idle_s


def together_s(prefills: Iterable[Prefill]) -> float:
    """Seconds that they take one behind the other, where passes are shared."""
    return max(ends_s(prefills), default=0.0)
