"""Who of those that wait for memory starts on a decode engine, newcomers and those that lost theirs alike.

Asks `slo.decode` for the order, whether the memory lasts and whether the others bear it. Owns what is kept
for the top tier, and how those that wait rise with time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slo.decode.output_length import OutputLengths
from slo.decode.predicted_peak import Holding, Pool
from slo.decode.reserve import TopTierReserve
from slo.decode.restore import STARVES_AFTER_S, restore_order
from slo.decode.victims import Stream
from slo.queue.ageing import Ageing
from slo.tiers import TierSet

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from decode_node.engine.pace import Pace
    from decode_node.engine.stream_book import StreamBook
    from decode_node.engine.view import StreamView
    from kv_transfer.swap.book import SwapBook


@dataclass(slots=True)
class _Room:
    """Memory while it is given out for one step.

    Attributes:
        pool: It, beside those that have some.
        holdings: Those.
        free_tokens: What is free, what is kept for the next steps of those included.
        reserve_tokens: What is kept for the top tier.
    """

    pool: Pool
    holdings: list[Holding]
    free_tokens: int
    reserve_tokens: float

    def keeps(self, newcomer: Holding) -> bool:
        """Whether one of the top tier is within what is kept for it."""
        return newcomer.tokens <= min(self.reserve_tokens, self.free_tokens)

    def give(self, newcomer: Holding, tokens: int, *, is_kept_for: bool) -> None:
        """A newcomer takes so much of what is free."""
        self.free_tokens -= tokens
        self.reserve_tokens -= newcomer.tokens if is_kept_for else 0
        self.holdings.append(newcomer)
        self.pool = replace(self.pool, free_tokens=self.pool.free_tokens - tokens)


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
        self._knows_top = False

    def arrives(self, request: Request) -> None:
        """A request has come."""
        self._knows_top = self._knows_top or self._view.rank(request) == self._tiers.top_rank

    def admitted(self, waits: Collection[Request], places: int, now_s: float) -> list[Request] | None:
        """Who of those that wait for memory may start, in order; None for all, as they stand.

        Args:
            waits: They.
            places: Streams that the engine has at most.
            now_s: Now.
        """
        view, held_by = self._view, self._view.holders()
        below = self._places_below(held_by, places, now_s)
        waiting = [request for request in waits if below > 0 or view.rank(request) == view.top_rank]
        if not waiting:
            return []
        room = self._room(held_by, now_s)
        requests = {request.request_id: request for request in waiting}
        ordered = restore_order(map(view.parked, waiting), self._tiers, self._ageing, now_s)
        shown: list[Request] = []
        restores = bool(self._book.restoring)
        is_held = False
        for parked in ordered:
            request = requests[parked.request_id]
            is_top = self._tiers.rank(parked.tier) == self._tiers.top_rank
            if (is_held and not (is_top and parked.is_newcomer)) or not (is_top or below > 0):
                continue
            newcomer = view.holding(request, self._lengths)
            is_kept_for = is_top and room.keeps(newcomer)
            if is_held and not is_kept_for:
                break
            needs: int | None = newcomer.tokens
            if not is_kept_for:
                needs = self._needs(request, newcomer, room, parked.since_s, now_s)
            computes = not parked.is_newcomer and not self._comes_back(request)
            has_turn = not (restores and computes)
            others, since_s = (*held_by, *shown), parked.since_s
            if needs is None or (
                has_turn
                and not (is_top or self._pace.admits(request, others, since_s, now_s, newcomer.ends_in))
            ):
                if is_top:
                    break
                is_held = True  # nobody passes it but those for whom memory is kept
                continue
            below -= not is_top
            room.give(newcomer, needs, is_kept_for=is_kept_for)  # also to one that waits for its turn alone
            if has_turn:
                restores = restores or computes
                self._book.accounts[parked.request_id].pulls_since_s = now_s
                shown.append(request)
        if len(shown) == len(waits) and not self._book.parked:
            return None
        return shown

    def _places_below(self, held_by: Sequence[Request], places: int, now_s: float) -> float:
        """How many below the top tier may start beside those that have memory, of all places."""
        top_rank = self._tiers.top_rank
        if not (self._knows_top and top_rank and (kept := self._reserve.places(places, now_s))):
            return math.inf  # vLLM keeps to its bound
        tops = sum([self._view.rank(request) == top_rank for request in held_by])
        return places - max(0, kept - tops) - len(held_by)

    def _room(self, held_by: Sequence[Request], now_s: float) -> _Room:
        """The memory that may be given out."""
        view = self._view
        holdings = [view.holding(request, self._lengths) for request in held_by]
        reserve = self.reserved_tokens(held_by, now_s)
        kept = len(view.running) * view.blocks_ahead if self._book.parked else 0
        pool = view.pool(held_by, kept)
        return _Room(pool, holdings, pool.free_tokens + kept * view.block_tokens, reserve)

    def _needs(
        self, request: Request, newcomer: Holding, room: _Room, since_s: float, now_s: float
    ) -> int | None:
        """Tokens of memory that a request takes which waits since then; None if it does not fit."""
        view, pool, is_top = self._view, room.pool, newcomer.rank == self._tiers.top_rank
        kept_tokens = 0.0 if is_top else room.reserve_tokens
        if pool.fit(room.holdings, newcomer, kept_tokens).fits:
            return newcomer.tokens
        prefix_tokens = view.prefix_tokens(request)
        if prefix_tokens and pool.fit(room.holdings, newcomer, kept_tokens, prefix_tokens).fits:
            return newcomer.tokens - prefix_tokens
        if is_top or now_s - since_s <= STARVES_AFTER_S:
            return None
        top_tokens, ahead_tokens = self.reserve(now_s) * pool.tokens, view.blocks_ahead * view.block_tokens
        fits = pool.fits_at_last(room.holdings, newcomer, top_tokens, ahead_tokens)
        return newcomer.tokens if fits else None

    def guaranteed(self, waits: Iterable[Request], now_s: float) -> list[Stream]:
        """Newcomers of the top tier that start within what is kept for it, if lower tiers can make room."""
        view, top_rank = self._view, self._tiers.top_rank
        tops = [request for request in waits if view.rank(request) == top_rank]
        if not tops or not (kept := self.reserved_tokens(view.holders(), now_s)):
            return []
        lower = [request for request in view.running if view.rank(request) < top_rank]
        room = view.free_blocks + sum([len(view.blocks(request)) for request in lower])
        found = []
        for request in tops:
            blocks = view.blocks_for(request.num_tokens)
            if blocks * view.block_tokens > kept or blocks > room:
                break
            kept, room = kept - blocks * view.block_tokens, room - blocks
            found.append(Stream(request.request_id, top_rank, 0.0, 0, 0, blocks, blocks, 0))
        return found

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
        """All that is kept for the top tier, as a part of the pool."""
        return self._reserve.part(now_s)

    def _comes_back(self, request: Request) -> bool:
        """Whether what a request has lost need not be computed here."""
        is_swapped = self._swaps is not None and self._swaps.tokens_of(request.request_id) > 0
        return is_swapped or self._book.accounts[request.request_id].pulls
