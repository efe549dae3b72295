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

    @staticmethod
    def told(done: Sequence[Sequence[float]], pair_work: float, late_by: int) -> PassShape:
        """The shape of which another process tells the parts, as plain numbers."""
        return PassShape(tuple([PassPart(*part) for part in done]), pair_work, late_by)

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
        found: list[PassPart] = []
        for size in sorted(self._behind(1 + self.late_by), reverse=True):
            if not found or size.pairs > found[-1].pairs + _ROUNDING:
                found.append(size)
        return tuple(found)

    def mean_stop(self) -> MeanStop:
        """How long a stop takes in the mean, over orders at any moment of a pass."""
        by_tokens = by_both = by_pairs = 0.0
        for at, until in zip(self._behind(1), self._behind(1 + self.late_by), strict=True):
            # An order that comes while a stretch runs waits for half of it, and for those behind it.
            tokens, pairs = until.tokens - at.tokens / 2, until.pairs - at.pairs / 2
            by_tokens += at.tokens * tokens
            by_both += at.tokens * pairs + at.pairs * tokens
            by_pairs += at.pairs * pairs
        return MeanStop(by_tokens, by_both, by_pairs)

    def _behind(self, stretches: int) -> list[PassPart]:
        """What lies between each boundary and the one so many stretches behind it."""
        ends = [self.at(number + stretches) for number in range(self.boundaries)]
        return [PassPart(end[0] - at[0], end[1] - at[1]) for at, end in zip(self.done, ends, strict=True)]


class MeanStop(NamedTuple):
    """The mean time to a stop, for a pass of any tokens and pairs.

    With a stretch of d seconds and s until the stop behind it, orders that come at any moment wait for the
    sum of d * (s - d/2) over that of d. Both are sums of what goes with tokens and what goes with pairs.
    """

    by_tokens: float
    by_both: float
    by_pairs: float

    def seconds(self, tokens_s: float, pairs_s: float) -> float:
        """The mean, where so many seconds of the pass go with its tokens, and with its pairs."""
        whole_s = tokens_s + pairs_s
        if whole_s <= 0:
            return 0.0
        of_tokens = (self.by_tokens * tokens_s + self.by_both * pairs_s) * tokens_s
        return (of_tokens + self.by_pairs * pairs_s**2) / whole_s


def _before(work: Sequence[float]) -> tuple[list[float], float]:
    """The fraction before each stretch, and the sum; sum() rounds otherwise from Python 3.12 on."""
    *before, total = accumulate(work, initial=0.0)
    return ([each / total for each in before] if total > 0 else [], total)
