"""Who of those that wait for memory starts on a decode engine, newcomers and those that lost theirs alike.

Says to `slo.decode.admission` what there is and who waits. Owns what is kept for the top tier, and how those
that wait rise with time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from slo.decode.admission import Chances, Room, guaranteed, starts
from slo.decode.output_length import OutputLengths
from slo.decode.predicted_peak import Holding
from slo.decode.reserve import TopTierReserve
from slo.decode.restore import Parked, restore_order
from slo.decode.victims import Stream
from slo.queue.ageing import Ageing
from slo.tiers import TierSet

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from decode_node.engine.pace import Beside, Pace
    from decode_node.engine.stream_book import StreamBook
    from decode_node.engine.view import StreamView
    from kv_transfer.swap.book import SwapBook


_LOOKS_AGAIN_S: Final = 0.05
"""After so long those that wait are asked again, though nothing is seen to have changed: others come closer
to their ends, and those that wait rise."""


class _Full(NamedTuple):
    """A step before which nobody could start, for want of memory or places.

    Attributes:
        counts: Who was there then, in numbers that change with any of them.
    """

    at_s: float
    free_blocks: int
    counts: tuple[int, ...]


class Admission:
    """Admits to one engine.

    Args:
        view: Its requests.
        book: How they stand.
        pace: What the others bear.
        lengths: How much is to come of them.
        tiers: Ranks, and how they rise.
        swaps: Whose KV is in host memory; None without any.
    """

    def __init__(
        self,
        view: StreamView,
        book: StreamBook,
        pace: Pace,
        lengths: OutputLengths,
        tiers: TierSet,
        swaps: SwapBook | None,
    ) -> None:
        self._view = view
        self._book = book
        self._pace = pace
        self._lengths = lengths
        self._tiers = tiers
        self._swaps = swaps
        self._reserve = TopTierReserve()
        self._ageing = Ageing()
        self._chances = Chances()
        self._knows_top = False
        self._arrivals = 0
        self._full: _Full | None = None

    def arrives(self, request: Request) -> None:
        """A request has come."""
        self._arrivals += 1
        self._knows_top = self._knows_top or self._view.rank(request) == self._tiers.top_rank

    def admitted(self, waits: Collection[Request], places: int, now_s: float) -> list[Request] | None:
        """Who of those that wait for memory may start, in order; None for all, as they stand.

        All of them start with the next step then, if it has room for what it computes of them.

        Args:
            waits: They.
            places: Streams that the engine has at most.
            now_s: Now.
        """
        if self._is_as_full(waits, now_s):
            return []
        view, held_by = self._view, self._view.holders()
        left, kept = self._places(held_by, places, now_s)
        waiting = [
            request for request in waits if left > (0 if view.rank(request) == view.top_rank else kept)
        ]
        if not waiting:
            self._note_full(waits, now_s)
            return []
        requests = {request.request_id: request for request in waiting}
        parked = [view.parked(request, now_s) for request in waiting]
        room = self._room(held_by, left, kept, now_s)
        ordered = restore_order(parked, self._tiers, self._ageing, now_s, room.holdings, room.pool.tokens)
        beside = self._pace.beside(held_by, now_s)
        waiters = _Waiters(view, self._book, self._pace, self._lengths, self._swaps, requests, beside, now_s)
        found = starts(ordered, waiters, room, self._tiers, now_s)
        self._full = None
        if not (found or room.is_paced):
            self._note_full(waits, now_s)
        for one in found:
            self._book.accounts[one.request_id].pulls_since_s = now_s
        if len(found) == len(waits) and not self._book.parked:
            return None
        return [requests[one.request_id] for one in found]

    def _is_as_full(self, waits: Collection[Request], now_s: float) -> bool:
        """Whether there is no more room, and nobody else, than when nobody could start."""
        full = self._full
        return (
            full is not None
            and now_s - full.at_s <= _LOOKS_AGAIN_S
            and self._view.free_blocks <= full.free_blocks
            and self._counts(waits) == full.counts
        )

    def _note_full(self, waits: Collection[Request], now_s: float) -> None:
        self._full = _Full(now_s, self._view.free_blocks, self._counts(waits))

    def _counts(self, waits: Collection[Request]) -> tuple[int, ...]:
        book = self._book
        return self._arrivals, len(waits), len(self._view.running), len(book.parked), len(book.restoring)

    def _places(self, held_by: Sequence[Request], places: int, now_s: float) -> tuple[float, int]:
        """How many may start beside those that have memory, and how many of these of the top tier alone."""
        top_rank = self._tiers.top_rank
        if not top_rank:
            return math.inf, 0  # nobody passes anybody; vLLM keeps to its bound
        left = places - len(held_by)
        if not self._knows_top:
            return left, 0
        tops = sum([self._view.rank(request) == top_rank for request in held_by])
        return left, self._reserve.places_kept(places, tops, now_s)

    def _room(self, held_by: Sequence[Request], places: float, places_kept: int, now_s: float) -> Room:
        """The memory and the places that may be given out."""
        view = self._view
        pool = view.pool(held_by)
        return Room(
            pool,
            [view.holding(request, self._lengths) for request in held_by],
            [view.rank(request) for request in view.running] if self._book.parked else [],
            self.reserved_tokens(held_by, now_s),
            self.reserve(now_s) * pool.tokens,
            view.blocks_ahead * view.block_tokens,
            places,
            places_kept,
            restores=bool(self._book.restoring),
            chances=self._chances,
        )

    def guaranteed(self, waits: Iterable[Request], now_s: float) -> list[Stream]:
        """Newcomers of the top tier that start within what is kept for it, if lower tiers can make room."""
        view, top_rank = self._view, self._tiers.top_rank
        tops = [request for request in waits if view.rank(request) == top_rank]
        if not tops or not (kept := self.reserved_tokens(held_by := view.holders(), now_s)):
            return []
        lower = [request for request in view.running if view.rank(request) < top_rank]
        beside = view.pool(request for request in held_by if view.rank(request) == top_rank)
        room = beside.free_tokens // view.block_tokens + sum([view.own_blocks(one) for one in lower])
        kept_blocks = kept / view.block_tokens
        most = min(view.free_blocks, kept_blocks)
        needs = ((request.request_id, self._blocks_needed(request, most)) for request in tops)
        return guaranteed(needs, top_rank, kept_blocks, room)

    def _blocks_needed(self, request: Request, most: float) -> int:
        """Blocks for a newcomer; where they are more than `most`, without those that others hold."""
        view = self._view
        blocks = view.blocks_for(request.num_tokens)
        if blocks > most:
            blocks -= view.prefix_tokens(request) // view.block_tokens
        return blocks

    def reserved_tokens(self, held_by: Sequence[Request], now_s: float) -> float:
        """Memory that is kept for the top tier, in tokens, beside what it has of those that have memory."""
        view, top_rank = self._view, self._tiers.top_rank
        tops = [request for request in held_by if view.rank(request) == top_rank]
        part = view.distinct_blocks(tops) / view.pool_blocks
        self._reserve.observe(part, now_s)
        if top_rank == 0:
            return 0.0
        return self._reserve.kept(part, now_s) * view.pool_blocks * view.block_tokens

    def reserve(self, now_s: float) -> float:
        """All that is kept for the top tier, as a part of the pool; nothing where there is no other tier."""
        return self._reserve.part(now_s) if self._tiers.top_rank else 0.0


@dataclass(frozen=True, slots=True)
class _Waiters:
    """Those that wait for memory in one step."""

    view: StreamView
    book: StreamBook
    pace: Pace
    lengths: OutputLengths
    swaps: SwapBook | None
    requests: Mapping[str, Request]
    beside: Beside
    now_s: float

    def holding(self, parked: Parked) -> Holding:
        """What it would hold, and how much more it will take."""
        return self.view.holding(self.requests[parked.request_id], self.lengths)

    def prefix_tokens(self, parked: Parked) -> int:
        """Of its sequence, the tokens whose KV others hold."""
        return self.view.prefix_tokens(self.requests[parked.request_id])

    def is_computed_again(self, parked: Parked) -> bool:
        """Whether what it has lost is neither in host memory nor on its way from the prefill tier."""
        name = parked.request_id
        is_swapped = self.swaps is not None and self.swaps.tokens_of(name) > 0
        return not (parked.is_newcomer or is_swapped or self.book.accounts[name].pulls)

    def is_borne(self, parked: Parked, starts: Sequence[Parked]) -> bool:
        """Whether the pace of those that run, and of those that start before it, bears it."""
        newcomers = [self.requests[one.request_id] for one in starts]
        beside = self.pace.beside(newcomers, self.now_s, self.beside) if newcomers else self.beside
        request = self.requests[parked.request_id]
        to_come = self.view.expected(request, self.lengths).remaining
        return self.pace.admits(request, beside, parked.since_s, self.now_s, to_come)
