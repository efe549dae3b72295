"""Who of those that wait for memory starts on a decode engine, newcomers and those that lost theirs alike.

Pure: an engine, real or in virtual time, says who waits and what is there, and is asked about one of them
only when it is its turn. Nobody passes one that is held back, but those of the top tier for whom memory is
kept. Two hold nobody back, as they gain nothing by others' waiting: one that for some seconds would not have
fitted beside what tiers above it hold, and one of the top tier that its own tier's pace does not bear, which
has its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from slo.decode.predicted_peak import Holding, Pool, shared_from
from slo.decode.reserve import UNUSED
from slo.decode.restore import STARVES_AFTER_S, Parked
from slo.decode.victims import Stream
from slo.tiers import TierSet

HELD_FOR_S: Final = 5.0
"""So long others wait behind one after it would have fitted beside what tiers above it hold: what those hold
goes up and down."""


class Waiters(Protocol):
    """What an engine knows of those that wait."""

    def holding(self, parked: Parked) -> Holding:
        """What it would hold, and how much more it will take."""

    def prefix_tokens(self, parked: Parked) -> int:
        """Of its sequence, the tokens whose KV others hold."""

    def is_computed_again(self, parked: Parked) -> bool:
        """Whether what it has lost is computed again here; false for a newcomer."""

    def is_borne(self, parked: Parked, starts: Sequence[Parked]) -> bool:
        """Whether the pace of those that run, and of those that start before it, bears it."""


@dataclass(slots=True)
class Chances:
    """When those that wait would last have fitted beside what tiers above them hold; an engine keeps it."""

    _seen_s: dict[str, float] = field(default_factory=dict)

    def keep(self, waiting: Iterable[Parked]) -> None:
        """Nobody else waits any more."""
        if self._seen_s:
            names = {parked.request_id for parked in waiting}
            self._seen_s = {name: at_s for name, at_s in self._seen_s.items() if name in names}

    def gains(self, parked: Parked, now_s: float, *, fits: bool) -> bool:
        """Whether one that would fit now, or not, gains by others' waiting."""
        if fits:
            self._seen_s[parked.request_id] = now_s
        return now_s - self._seen_s.get(parked.request_id, -math.inf) <= HELD_FOR_S


@dataclass(slots=True)
class Room:
    """Memory and places while they are given out for one step.

    Attributes:
        pool: The memory, beside those that have some.
        holdings: Those.
        running: While somebody waits for memory that was taken: ranks of those that run, for whose next steps
            some is kept.
        reserve_tokens: What the top tier gets before all others, beside what it holds.
        top_tokens: The same with what it holds.
        ahead_tokens: What a stream takes at most in the next steps.
        places: How many may start.
        places_kept: Of these, those that are kept for the top tier.
        restores: Whether somebody computes again what it has lost.
        is_paced: Whether somebody for whom there is memory is held back for the others' pace.
        too_large: The last one that gains nothing by others' waiting.
        chances: Who does.
        unused: See `slo.decode.reserve.UNUSED`.
    """

    pool: Pool
    holdings: list[Holding]
    running: Sequence[int]
    reserve_tokens: float
    top_tokens: float
    ahead_tokens: int
    places: float = math.inf
    places_kept: int = 0
    restores: bool = False
    is_paced: bool = False
    too_large: Holding | None = None
    chances: Chances = field(default_factory=Chances)
    unused: float = UNUSED

    def has_place(self, *, is_top: bool) -> bool:
        """Whether one more may start, of the top tier or below it."""
        return self.places > (0 if is_top else self.places_kept)

    @property
    def unused_tokens(self) -> float:
        """What tiers below the top one leave unused for it."""
        return self.unused * self.reserve_tokens

    def keeps(self, tokens: int) -> bool:
        """Whether so many that one of the top tier takes are within what is kept for it."""
        return tokens <= min(self.reserve_tokens, self.pool.free_tokens)

    def pool_for(self, rank: int) -> Pool:
        """The memory without what is kept for the next steps; tiers below that yield instead."""
        kept_tokens = self.ahead_tokens * sum([other >= rank for other in self.running])
        return replace(self.pool, free_tokens=self.pool.free_tokens - kept_tokens)

    def give(self, newcomer: Holding, tokens: int, *, is_top: bool, is_kept_for: bool) -> None:
        """A newcomer takes so much of what is free."""
        self.places -= 1
        self.places_kept -= is_top and self.places_kept > 0
        self.reserve_tokens -= tokens if is_kept_for else 0
        self.holdings.append(newcomer)
        self.pool = replace(self.pool, free_tokens=self.pool.free_tokens - tokens)


def starts(
    ordered: Sequence[Parked], waiters: Waiters, room: Room, tiers: TierSet, now_s: float
) -> list[Parked]:
    """Who may start with the next step, in order.

    Args:
        ordered: Those that wait, as in `slo.decode.restore`.
        waiters: What is known of them.
        room: What there is; it is given out.
        tiers: Ranks.
        now_s: Now.
    """
    found: list[Parked] = []
    is_held = False
    room.chances.keep(ordered)
    for parked in ordered:
        is_top = tiers.rank(parked.tier) == tiers.top_rank
        if (is_held and not (is_top and parked.is_newcomer)) or not room.has_place(is_top=is_top):
            continue
        newcomer = waiters.holding(parked)
        if not is_top and _is_as_large(parked, waiters, newcomer, room.too_large):
            continue
        needs = _kept_for(parked, waiters, newcomer, room) if is_top else None
        is_kept_for = needs is not None
        if is_held and not is_kept_for:
            break
        if needs is None:
            needs = _needs(parked, waiters, newcomer, room, now_s, is_top=is_top)
        if needs is None:
            if is_top:
                break
            fits = _fits_beside_higher(parked, waiters, newcomer, room, now_s)
            is_held = room.chances.gains(parked, now_s, fits=fits)
            room.too_large = None if is_held else newcomer
            continue
        computes = waiters.is_computed_again(parked)
        has_turn = not (room.restores and computes)
        is_slow = has_turn and not waiters.is_borne(parked, found)
        room.is_paced = room.is_paced or is_slow
        if is_slow and not is_top:
            is_held = True
            continue
        # Also to one that waits for its turn alone, or of the top tier for its pace.
        room.give(newcomer, needs, is_top=is_top, is_kept_for=is_kept_for)
        if has_turn and not is_slow:
            room.restores = room.restores or computes
            found.append(parked)
    return found


def _kept_for(parked: Parked, waiters: Waiters, newcomer: Holding, room: Room) -> int | None:
    """Tokens that one of the top tier takes of what is kept for it; None if that is not enough."""
    tokens = newcomer.tokens
    if not room.keeps(tokens):
        tokens -= waiters.prefix_tokens(parked)
    return tokens if room.keeps(tokens) else None


def _needs(
    parked: Parked, waiters: Waiters, newcomer: Holding, room: Room, now_s: float, *, is_top: bool
) -> int | None:
    """Tokens of memory that a request takes; None if it does not fit."""
    pool, kept_tokens = room.pool_for(newcomer.rank), 0.0 if is_top else room.unused_tokens
    if pool.fits(room.holdings, newcomer, kept_tokens):
        return newcomer.tokens
    prefix_tokens = waiters.prefix_tokens(parked)
    if prefix_tokens and pool.fits(room.holdings, newcomer, kept_tokens, prefix_tokens):
        return newcomer.tokens - prefix_tokens
    if is_top or now_s - parked.since_s <= STARVES_AFTER_S:
        return None
    fits = pool.fits_at_last(room.holdings, newcomer, room.top_tokens, room.ahead_tokens)
    return newcomer.tokens if fits else None


def _is_as_large(parked: Parked, waiters: Waiters, newcomer: Holding, other: Holding | None) -> bool:
    """Whether one takes at least as much as another that stands before it."""
    if other is None or newcomer.tokens < other.tokens or newcomer.remaining < other.remaining:
        return False
    return newcomer.tokens - waiters.prefix_tokens(parked) >= other.tokens


def _fits_beside_higher(
    parked: Parked, waiters: Waiters, newcomer: Holding, room: Room, now_s: float
) -> bool:
    """Whether one would fit if only tiers above the one that it has risen to had memory."""
    level = max(newcomer.rank, parked.level)
    above = [one for one in room.holdings if one.rank > level]
    shared_tokens = shared_from(level + 1, room.holdings, room.pool.shared_tokens)
    free_tokens = room.pool.tokens - sum([one.tokens for one in above]) + shared_tokens
    beside = replace(
        room,
        pool=replace(room.pool, free_tokens=free_tokens, shared_tokens=shared_tokens),
        holdings=above,
        running=[rank for rank in room.running if rank > level],
    )
    return _needs(parked, waiters, newcomer, beside, now_s, is_top=False) is not None


def guaranteed(
    newcomers: Iterable[tuple[str, int]], top_rank: int, kept_blocks: float, room_blocks: int
) -> list[Stream]:
    """Newcomers of the top tier that start within what is kept for it, if lower tiers can make room.

    Args:
        newcomers: Names and the blocks that each needs beside those that others hold, in their order.
        top_rank: The rank of the top tier.
        kept_blocks: What is kept for it, beside what it holds.
        room_blocks: What is free beside what the top tier's sequences still need, and what streams of lower
            tiers hold that nobody shares.
    """
    found = []
    for name, blocks in newcomers:
        if blocks > kept_blocks or blocks > room_blocks:
            break
        kept_blocks, room_blocks = kept_blocks - blocks, room_blocks - blocks
        found.append(Stream(name, top_rank, 0.0, 0, 0, blocks, blocks, 0))
    return found
