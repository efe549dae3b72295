"""How long the steps of a decode engine take: from the end of one to that of the next while it is busy.

A stream waits for what lies between two steps as well as for the steps. Owns when a step began; what is
learned of it is `slo.decode.step_time`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from slo.decode.step_time import StepShape, StepTimes

_LEARN_EVERY: Final = 4


class StepClock:
    """Times the steps of one engine.

    Args:
        times: Learns from them.

    Attributes:
        ended_s: When the latest step ended.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.ended_s = 0.0
        self._began_s = 0.0
        self._is_busy = False
        self._shape: StepShape | None = None
        self._steps = 0

    def wants_next(self) -> bool:
        """Whether the step that is issued is one to learn from; asked once for each."""
        self._steps += 1
        return not self._times.is_known or self._steps % _LEARN_EVERY == 0

    def begins(self, shape: StepShape, now_s: float) -> None:
        """A step to learn from is issued."""
        self._shape = shape
        self._began_s = self.ended_s if self._is_busy else now_s

    def ends(self, now_s: float) -> None:
        """The step is complete."""
        if self._shape is not None:
            self._times.observe(self._shape, now_s - self._began_s)
            self._shape = None
        self.ended_s = now_s

    def goes_on(self, *, is_busy: bool) -> None:
        """Whether there is more to do now; if so, the next step begins where this one has ended."""
        self._is_busy = is_busy
