"""What a decode engine under pressure tells: what it has done, at once, and what it holds, now and then.

Owns the figures until they are told, and when the latest were. They travel with vLLM's statistics of a step,
see `telemetry.pressure`; the router gets its part of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kv_transfer.swap.book import SwapBook, SwapFigures
from slo.decode.headroom import DecodeLoad
from slo.decode.output_length import OutputLengths
from slo.decode.predicted_peak import Pool, predicted_peak
from slo.decode.reserve import UNUSED
from slo.tiers import TierSet
from telemetry.pressure import PressureFigures

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from decode_node.engine.admission import Admission
    from decode_node.engine.pace import Pace
    from decode_node.engine.view import StreamView

_PUBLISH_S: Final = 0.5
"""Gauges are published so often, events at once."""


class PressureReport:
    """That of one engine.

    Args:
        view: Its requests.
        pace: What its steps take.
        admission: What is kept for the top tier.
        lengths: How much is to come of its requests.
        tiers: Their tiers.
        swaps: What was moved to host memory and back; None without any.

    Attributes:
        figures: What has happened and was not told yet; those who act add to it.
    """

    def __init__(
        self,
        view: StreamView,
        pace: Pace,
        admission: Admission,
        lengths: OutputLengths,
        tiers: TierSet,
        swaps: SwapBook | None,
    ) -> None:
        self._view = view
        self._pace = pace
        self._admission = admission
        self._lengths = lengths
        self._tiers = tiers
        self._swaps = swaps
        self._published_s = 0.0
        self.figures = PressureFigures()

    def take(self, requests: Mapping[str, Request], now_s: float) -> PressureFigures | None:
        """What is to be told now; None for nothing."""
        if now_s - self._published_s >= _PUBLISH_S or not requests:
            self._published_s = now_s
            self._measure(requests, now_s)
        if self.figures.is_empty:
            return None
        figures, self.figures = self.figures, PressureFigures()
        return figures

    def _measure(self, requests: Mapping[str, Request], now_s: float) -> None:
        """Add what the engine holds."""
        figures = self.figures
        held_by = self._view.holders()
        pool = self._view.pool(held_by)
        figures.peak, figures.reserve = self._peak(held_by, pool), self._admission.reserve(now_s)
        figures.load = self._load(requests, held_by, pool, now_s)
        if self._swaps is not None:
            figures.swap_used, moved = self._swaps.used, self._swaps.figures
            figures.swapped_out, figures.swapped_back = moved.out, moved.back
            self._swaps.figures = SwapFigures()

    def _peak(self, held_by: Sequence[Request], pool: Pool) -> float:
        """The predicted peak of those that have memory, as a part of the pool."""
        peak = predicted_peak([self._view.expected(request, self._lengths) for request in held_by])
        return max(0, peak - pool.shared_tokens) / pool.tokens

    def _load(
        self, requests: Mapping[str, Request], held_by: Sequence[Request], pool: Pool, now_s: float
    ) -> DecodeLoad:
        """What the router is told."""
        view, lengths = self._view, self._lengths
        unfinished = [request for request in requests.values() if not request.is_finished()]
        return DecodeLoad(
            pool.tokens,
            pool.shared_tokens,
            int(UNUSED * self._admission.reserved_tokens(held_by, now_s)),
            self._pace.step_s(),
            {view.job(request): view.expected(request, lengths) for request in unfinished},
            {tier: lengths.whole(tier, "", view.max_model_len) for tier in self._tiers.names},
        )
