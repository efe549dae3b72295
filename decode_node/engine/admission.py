"""Who of those that wait for memory starts on a decode engine, newcomers and those that lost theirs alike.

Asks `slo.decode` for the order, whether the memory lasts and whether the others bear it. Owns what is kept
for the top tier, and how those that wait rise with time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slo.decode.output_length import OutputLengths
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

    def admitted(self, waits: Iterable[Request], now_s: float) -> list[Request] | None:
        """Who of those that wait for memory may start, in order; None for all, as they stand."""
        view, waiting = self._view, list(waits)
        held_by = view.holders()
        holdings = [view.holding(request, self._lengths) for request in held_by]
        reserve = self.reserved_tokens(held_by, now_s)
        kept = len(view.running) * view.blocks_ahead if self._book.parked else 0
        pool = view.pool(held_by, kept)
        free = pool.free_tokens + kept * view.block_tokens
        requests = {request.request_id: request for request in waiting}
        ordered = restore_order(map(view.parked, waiting), self._tiers, self._ageing, now_s)
        shown: list[Request] = []
        restores = bool(self._book.restoring)
        is_held = False
        for parked in ordered:
            request = requests[parked.request_id]
            is_top = self._tiers.rank(parked.tier) == self._tiers.top_rank
            if is_held and not (is_top and parked.is_newcomer):
                continue
            newcomer = view.holding(request, self._lengths)
            is_kept_for = is_top and newcomer.tokens <= min(reserve, free)
            if is_held and not is_kept_for:
                break
            computes = not parked.is_newcomer and not self._comes_back(request)
            fits = is_kept_for or pool.fit(holdings, newcomer, 0.0 if is_top else reserve).fits
            if not fits and not is_top and now_s - parked.since_s > STARVES_AFTER_S:
                top_tokens = self.reserve(now_s) * pool.tokens
                ahead_tokens = view.blocks_ahead * view.block_tokens
                fits = pool.fits_at_last(holdings, newcomer, top_tokens, ahead_tokens)
            may_start = fits and not (restores and computes)
            others = (*held_by, *shown)
            if not may_start or not (is_top or self._pace.admits(request, others, parked.since_s, now_s)):
                if is_top:
                    break
                is_held = True  # nobody passes it but those for whom memory is kept
                continue
            free -= newcomer.tokens
            if is_kept_for:
                reserve -= newcomer.tokens
            restores = restores or computes
            self._book.accounts[parked.request_id].pulls_since_s = now_s
            holdings.append(newcomer)
            pool = replace(pool, free_tokens=pool.free_tokens - newcomer.tokens)
            shown.append(request)
        if len(shown) == len(waiting) and not self._book.parked:
            return None
        return shown

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
        blocks = 0
        for request in held_by:
            if view.rank(request) == top_rank:
                blocks += len(view.blocks(request))
        part = blocks / view.pool_blocks
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
