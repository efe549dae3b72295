"""How much KV memory the streams of a decode replica will take at most, and whether one more fits.

The peak is Past-Future's (arXiv 2507.10150, section 4.2): memory is fullest at the moment before one of the
streams ends, and there all that end later, or with it, hold what they have and what they have emitted since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

USABLE: Final = 0.95
"""Part of the pool that may be taken by prediction; the rest is for what predictions miss."""


class Holding(NamedTuple):
    """One stream's memory.

    Attributes:
        tokens: Whose KV it holds.
        remaining: Tokens that it is predicted to emit.
        rank: Of its tier; a newcomer is not kept waiting by tiers below its own.
        waits: Whether it has no memory yet, and emits nothing.
    """

    tokens: int
    remaining: int
    rank: int = 0
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """KV memory, in tokens.

    Attributes:
        tokens: What it holds.
        free_tokens: What is free.
        shared_tokens: What streams share, and so hold less than the sum of their holdings.
    """

    tokens: int
    free_tokens: int
    shared_tokens: int = 0

    def fits(
        self,
        held: Sequence[Holding],
        newcomer: Holding,
        reserve_tokens: float = 0.0,
        prefix_tokens: int = 0,
    ) -> bool:
        """Whether a newcomer fits beside those that are there; one that is alone does, whatever it takes.

        Of lower tiers only what they hold now counts: when memory runs short, they yield.

        Args:
            held: Those that are there.
            newcomer: Its sequence so far, and what it will emit.
            reserve_tokens: What is kept for tiers above it.
            prefix_tokens: Of its sequence, what those that are there hold already.
        """
        if not held:
            return True
        if newcomer.tokens - prefix_tokens > self.free_tokens - reserve_tokens:
            return False
        peers = not_below(newcomer.rank, held)
        shared_tokens = shared_from(newcomer.rank, held, self.shared_tokens + prefix_tokens)
        return predicted_peak([*peers, newcomer]) - shared_tokens <= USABLE * self.tokens - reserve_tokens

    def fits_at_last(
        self, held: Sequence[Holding], newcomer: Holding, kept_tokens: float, ahead_tokens: int
    ) -> bool:
        """Whether one starts that has waited for long, and would never fit beside what others are kept.

        Only tiers above its own may have memory beside it; when that runs short, it yields to them.

        Args:
            held: Those that are there.
            newcomer: Its sequence so far, and what it will emit.
            kept_tokens: What is kept for tiers above it, what they hold of that included.
            ahead_tokens: What it needs beyond its sequence to begin.
        """
        if newcomer.tokens + newcomer.remaining <= USABLE * self.tokens - kept_tokens:
            return False
        fits = newcomer.tokens + min(newcomer.remaining, ahead_tokens) <= self.free_tokens
        return fits and all(one.rank > newcomer.rank for one in held)


def not_below(rank: int, streams: Sequence[Holding]) -> Sequence[Holding]:
    """Those of a tier and of the tiers above it."""
    return [stream for stream in streams if stream.rank >= rank]


def shared_from(rank: int, held: Iterable[Holding], shared_tokens: int) -> int:
    """Of the tokens that streams share, so many at least are shared among those of a tier and above.

    They use no more memory than all do, so that what they hold beyond that is shared.

    Args:
        rank: Of the tier.
        held: All streams; those that wait hold nothing.
        shared_tokens: What all of them share.
    """
    if not shared_tokens:
        return 0
    return max(0, shared_tokens - tokens_below(rank, held))


def tokens_below(rank: int, held: Iterable[Holding]) -> int:
    """What the streams of the tiers below one hold; those that wait hold nothing."""
    return sum([one.tokens for one in held if one.rank < rank and not one.waits])


def predicted_peak(streams: Iterable[Holding]) -> int:
    """The most tokens that are held at any time until all of them have ended, if nobody joins them."""
    ordered = sorted(streams, key=lambda stream: -stream.remaining)
    held = peak = 0
    for number, stream in enumerate(ordered, 1):
        held += stream.tokens
        peak = max(peak, held + number * stream.remaining)
    return peak
