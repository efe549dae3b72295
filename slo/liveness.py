"""When an engine counts as hung: work waits there, and for too long nothing has come of it.

Owns the limit and the account of time without progress, pure. What progress is, and what becomes of a hung
engine, is `engine_host.watchdog`'s.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

HUNG_AFTER_S: Final = 5.0
"""No engine is hung before this, if nothing else is configured."""
STALL_PASSES: Final = 5.0
"""Nor is one before so many times what the pass that runs, or would run next, is predicted to take."""
MAX_LOOK_S: Final = 1.0
"""So much of the time since the last look counts at most: whoever was itself stopped has seen nothing."""


def stall_limit_s(pass_s: float, least_s: float = HUNG_AFTER_S) -> float:
    """Seconds without progress after which an engine is hung, at least `least_s`.

    Args:
        pass_s: Predicted time of its pass; one that is no number sets no limit above the least.
        least_s: Longer where a pass may have to compile a kernel, which nobody predicts.
    """
    limit_s = STALL_PASSES * pass_s
    return limit_s if least_s < limit_s < math.inf else least_s


@dataclass(slots=True)
class StallAccount:
    """Seconds that an engine has had work and made no progress, as far as somebody looked.

    Attributes:
        stalled_s: Those seconds, as of the last look.
    """

    stalled_s: float = 0.0
    _progress: Hashable = None
    _looked_at_s: float | None = None

    def look(self, progress: Hashable, *, has_work: bool, now_s: float) -> float:
        """Take note of where the engine is, and return `stalled_s`.

        Args:
            progress: Anything that is different when the engine has got on.
            has_work: Whether it has something to do.
            now_s: Seconds on a monotonic clock.
        """
        before_s, self._looked_at_s = self._looked_at_s, now_s
        if before_s is None or not has_work or progress != self._progress:
            self.stalled_s, self._progress = 0.0, progress
        else:
            self.stalled_s += min(now_s - before_s, MAX_LOOK_S)
        return self.stalled_s
