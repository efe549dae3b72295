"""What the way of a request takes besides queue and prefill, learned from first tokens that came.

Owns the median over the latest requests that found an idle replica and were not held up there: of others, the
difference between what was predicted and what came says more about the queue than about the way.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from typing import Final

from slo.request import JobId

REMEMBERED: Final = 32
"""Latest requests that count."""
MIN_SAMPLES: Final = 4
"""With fewer of them what is configured counts as one more."""
_MAX_UNDER_WAY: Final = 16_384


class PathTime:
    """From arrival to first token, but for queue and prefill."""

    def __init__(self) -> None:
        self._under_way: OrderedDict[JobId, float] = OrderedDict()
        self._samples: deque[float] = deque(maxlen=REMEMBERED)

    def placed(self, job_id: JobId, without_s: float) -> None:
        """A request went to an idle replica; `without_s` is its predicted TTFT without the way."""
        self._under_way[job_id] = without_s
        if len(self._under_way) > _MAX_UNDER_WAY:
            self._under_way.popitem(last=False)

    def ended(self, job_id: JobId, ttft_s: float | None) -> None:
        """A request is over; `ttft_s` is None when it had no first token that was measured."""
        without_s = self._under_way.pop(job_id, None)
        if without_s is not None and ttft_s is not None:
            self._samples.append(max(0.0, ttft_s - without_s))

    def seconds(self, configured_s: float) -> float:
        """What it takes; what is configured while nothing is known."""
        if len(self._samples) >= MIN_SAMPLES:
            return statistics.median(self._samples)
        return statistics.median([*self._samples, configured_s])

    def least_s(self, configured_s: float) -> float:
        """What it took when it was shortest; a decode tier that is busy makes the median longer."""
        if len(self._samples) >= MIN_SAMPLES:
            return min(self._samples)
        return min([*self._samples, configured_s])
