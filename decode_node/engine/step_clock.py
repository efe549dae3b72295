"""How long the steps of a decode engine take: from the end of one to that of the next while it is busy.

A stream waits for what lies between two steps as well as for the steps. Owns when a step began and what was
in it; what is learned of it is `slo.decode.step_time`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from slo.decode.step_time import StepShape, StepTimes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

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
        self._batch: Mapping[str, int] = {}
        """The streams of the latest step."""

    def issued(self, output: SchedulerOutput, requests: Mapping[str, Request], now_s: float) -> None:
        """A step is issued; it is timed if it is one to learn from."""
        self._steps += 1
        tokens: Mapping[str, int] = output.num_scheduled_tokens
        if not tokens:
            return
        before, self._batch = self._batch, tokens
        if self._times.is_known and self._steps % _LEARN_EVERY:
            return
        if getattr(output.kv_connector_metadata, "swaps", None) is not None:
            return  # blocks that move are no part of a step's own time
        streams = context = 0
        for name, new in tokens.items():
            if new == 1:
                streams += 1
            context += requests[name].num_computed_tokens
        moved = len(before.keys() ^ tokens.keys())
        self._shape = StepShape(streams, context, output.total_num_scheduled_tokens - streams, moved)
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
