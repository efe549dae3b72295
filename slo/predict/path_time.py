"""What the way of a request takes besides queue and prefill, learned from first tokens that came.

Owns the median over the latest requests that nothing held up at their replica: of others, the difference
between what was predicted and what came says more about the queue than about the way.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from typing import Final

from slo.request import JobId

REMEMBERED: Final = 32
"""Latest requests that count."""
MIN_SAMPLES: Final = 4
"""With fewer of them what is configured counts as one more, and is the most that it takes: the first prefills
of an engine are slow."""
FORGET_AFTER_S: Final = 3600.0
"""So long after the latest of them none counts any more."""
_MAX_UNDER_WAY: Final = 16_384


class PathTime:
    """From arrival to first token, but for queue and prefill."""

    def __init__(self) -> None:
        self._under_way: OrderedDict[JobId, tuple[float, float]] = OrderedDict()
        """Of each its predicted TTFT without the way, and when it was placed."""
        self._samples: deque[float] = deque(maxlen=REMEMBERED)
        self._latest_s = -math.inf

    def placed(self, job_id: JobId, without_s: float, now_s: float) -> None:
        """A request went where nothing is in its way; `without_s` is its predicted TTFT without the way."""
        self._under_way[job_id] = without_s, now_s
        if len(self._under_way) > _MAX_UNDER_WAY:
            self._under_way.popitem(last=False)

    def corrected(self, job_id: JobId, by_s: float) -> None:
        """The prefill of a request has become known to take so much longer than was predicted."""
        if (placed := self._under_way.get(job_id)) is not None:
            self._under_way[job_id] = placed[0] + by_s, placed[1]

    def ended(self, job_id: JobId, ttft_s: float | None) -> None:
        """A request is over; `ttft_s` is None when it had no first token that was measured."""
        placed = self._under_way.pop(job_id, None)
        if placed is not None and ttft_s is not None:
            without_s, placed_s = placed
            self._samples.append(max(0.0, ttft_s - without_s))
            self._latest_s = max(self._latest_s, placed_s)

    def forget_old(self, now_s: float) -> None:
        """Forget what was learned if it was long ago, as nothing has confirmed it since."""
        if now_s - self._latest_s > FORGET_AFTER_S:
            self._samples.clear()

    def seconds(self, configured_s: float) -> float:
        """What it takes; what is configured while nothing is known."""
        if len(self._samples) >= MIN_SAMPLES:
            return statistics.median(self._samples)
        return min(configured_s, statistics.median([*self._samples, configured_s]))

    def least_s(self, configured_s: float) -> float:
        """What it took when it was shortest; a decode tier that is busy makes the median longer."""
        if len(self._samples) >= MIN_SAMPLES:
            return min(self._samples)
        return min([*self._samples, configured_s])
