"""Where in a forward pass its boundaries lie.

Pure arithmetic. Operators take very unequal time, so counting boundaries would call a pass half done that has
computed a third of its work. And the work is of two kinds: that of the matrices grows with the tokens,
attention with the pairs of a query and a key, so that behind a long context nearly all is attention.
What an operator's work is, is `prefill_node.worker.operator_work`'s business; how long either kind takes,
`slo.predict.prefill_time`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

_ROUNDING: Final = 1e-12


class PassPart(NamedTuple):
    """A part of a forward pass.

    Attributes:
        tokens: Its fraction of the work that grows with the tokens.
        pairs: Its fraction of attention.
    """

    tokens: float
    pairs: float


NOTHING = PassPart(0.0, 0.0)
WHOLE = PassPart(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class PassShape:
    """The boundaries of a forward pass.

    Attributes:
        done: The part of the pass that lies before each boundary, in order; the first is nothing. Empty for a
            pass that cannot stop.
        pair_work: The work of a pair over that of a token; 0 when it is not known.
        late_by: How many boundaries after the one at which an order is seen the pass stops.
    """

    done: tuple[PassPart, ...]
    pair_work: float = 0.0
    late_by: int = 0

    @staticmethod
    def of(tokens: Sequence[float], pairs: Sequence[float] = ()) -> PassShape:
        """The shape of a pass from the work of each stretch behind a boundary, up to the next.

        Args:
            tokens: Of one token, in any unit; where none is known all stretches count the same.
            pairs: Of one pair, in the same unit; where none is known it lies as the other work does.
        """
        of_tokens, token_work = _before(tokens)
        of_pairs, pair_work = _before(pairs)
        if token_work <= 0:
            return PassShape.even(len(tokens))
        known = pair_work > 0
        done = [*map(PassPart, of_tokens, of_pairs if known else of_tokens)]
        return PassShape(tuple(done), pair_work / token_work if known else 0.0)

    @staticmethod
    def even(boundaries: int) -> PassShape:
        """A pass with as much work behind each boundary."""
        places = [number / boundaries for number in range(boundaries)]
        return PassShape(tuple(map(PassPart, places, places)))

    @property
    def boundaries(self) -> int:
        """Places where the pass can stop."""
        return len(self.done)

    def at(self, boundary: int) -> PassPart:
        """What is done at a boundary; the whole at the end of the pass, nothing if it has no boundaries."""
        if not self.done:
            return NOTHING
        return self.done[boundary] if boundary < len(self.done) else WHOLE

    def stretches(self) -> tuple[PassPart, ...]:
        """Those between two places where an order is heeded, of which one is the longest in any pass."""
        ends = [self.at(number + 1 + self.late_by) for number in range(self.boundaries)]
        sizes = [PassPart(end[0] - at[0], end[1] - at[1]) for at, end in zip(self.done, ends, strict=True)]
        found: list[PassPart] = []
        for size in sorted(sizes, reverse=True):
            if not found or size.pairs > found[-1].pairs + _ROUNDING:
                found.append(size)
        return tuple(found)


def _before(work: Sequence[float]) -> tuple[list[float], float]:
    """The fraction before each stretch, and the sum; sum() rounds otherwise from Python 3.12 on."""
    *before, total = accumulate(work, initial=0.0)
    return ([each / total for each in before] if total > 0 else [], total)
