"""How much of a forward pass lies before each of its boundaries.

Pure arithmetic. Operators take very unequal time, so counting boundaries would call a pass half done that has
computed a third of its work. What an operator's work is, is `prefill_node.worker.operator_work`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class PassShape:
    """The boundaries of a forward pass.

    Attributes:
        done: The fraction of the pass that lies before each boundary, in order; the first is 0. Empty for a
            pass that cannot stop.
    """

    done: tuple[float, ...]

    @staticmethod
    def of(work: Sequence[float]) -> PassShape:
        """The shape of a pass from the work behind each boundary, up to the next, in any unit.

        Where no work is known all stretches count the same.
        """
        *done, total = accumulate(work, initial=0.0)  # sum() rounds otherwise from Python 3.12 on
        if total <= 0:
            return PassShape.even(len(work))
        return PassShape(tuple(before / total for before in done))

    @staticmethod
    def even(boundaries: int) -> PassShape:
        """A pass with as much work behind each boundary."""
        return PassShape(tuple(number / boundaries for number in range(boundaries)))

    @property
    def boundaries(self) -> int:
        """Places where the pass can stop."""
        return len(self.done)

    def at(self, boundary: int) -> float:
        """The fraction that is done at a boundary; 1 at the end of the pass, 0 if it has no boundaries."""
        if not self.done:
            return 0.0
        return self.done[boundary] if boundary < len(self.done) else 1.0

    def longest(self, ahead: int = 0) -> float:
        """The largest fraction between a boundary and the one `ahead` + 1 after it."""
        return max((self.at(number + 1 + ahead) - done for number, done in enumerate(self.done)), default=0.0)
