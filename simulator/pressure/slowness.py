"""By what factor the steps of a simulated engine take longer, or less, than its model says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Final

KEEPS_S: Final = 2.0
"""After so long a machine's speed has 1/e left of what it was off by."""


@dataclass(slots=True)
class Slowness:
    """White noise from step to step, times a speed that drifts: a first-order autoregressive process.

    Attributes:
        noise: Standard deviation of the logarithm of the noise.
        drift: The same of the speed.
        seed: Of both.
    """

    noise: float
    drift: float
    seed: int
    _rng: Random = field(init=False)
    _off: float = field(init=False, default=0.0)
    _at_s: float = field(init=False, default=-math.inf)

    def __post_init__(self) -> None:  # noqa: D105 - sets what the arguments say
        self._rng = Random(self.seed)  # noqa: S311 - times of steps

    def factor(self, now_s: float) -> float:
        """That of a step which begins now; asked in the order of time."""
        factor = self._rng.lognormvariate(0.0, self.noise) if self.noise else 1.0
        if self.drift:
            kept = math.exp((self._at_s - now_s) / KEEPS_S)
            self._off = kept * self._off + self._rng.gauss(0.0, self.drift * math.sqrt(1 - kept * kept))
            self._at_s = now_s
            factor *= math.exp(self._off)
        return factor
