"""SlackServe's way to bear it when a decode engine's memory runs short: the rules of `slo.decode`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.pressure.decoding import PressedStream
from simulator.pressure.engine import PressedEngine
from slo.decode.admission import Chances, Room, guaranteed, starts
from slo.decode.composition import chunk_within
from slo.decode.headroom import DecodeLoad
from slo.decode.output_length import OutputLengths
from slo.decode.predicted_peak import Holding, Pool
from slo.decode.reserve import UNUSED, TopTierReserve
from slo.decode.restore import Parked, restore_order
from slo.decode.step_time import StepShape
from slo.decode.victims import HORIZON_STEPS, HostRoom, Stream, VictimRules
from slo.queue.ageing import Ageing
from slo.request import JobId
from slo.tiers import Tier, TierSet

_LONGEST: Final = 1 << 20
"""Tokens that no answer has."""


class Ours:
    """SlackServe's rules in `slo.decode`, as `decode_node.engine.pressure_scheduler` carries them out.

    TPOT objectives leave nobody out of a step and keep nobody waiting; `simulator.pressure.in_pace` has that.

    Attributes:
        lengths: What it has learned of answers.
        unused: See `slo.decode.reserve.UNUSED`.
    """

    def __init__(self, tiers: TierSet) -> None:
        self._tiers = tiers
        self.lengths = OutputLengths()
        self.unused = UNUSED
        self._reserve = TopTierReserve()
        self._ageing = Ageing()
        self._chances = Chances()

    def chunk_tokens(self, engine: PressedEngine) -> int:
        """As configured; while somebody computes again, no more than the tightest pace bears."""
        most, token_s = engine.setup.chunk_tokens, engine.setup.prompt_token_s
        decoding = [one for one in engine.running if one.length - one.computed == 1]
        objectives = [one.asked.tpot_s for one in decoding if one.asked.tpot_s is not None]
        is_restoring = any(one.parked_s is not None for one in engine.waiting) or _restores(engine)
        if not (objectives and token_s and is_restoring):
            return most
        return chunk_within(min(objectives), token_s, most)

    def relieve(self, engine: PressedEngine) -> None:
        """Take memory ahead of the next steps, by cost."""
        setup = engine.setup
        if not engine.running:
            return
        others = self._guaranteed(engine)
        waited_for = sum(one.next_blocks for one in others)
        while sum(engine.next_blocks(one) for one in engine.running) + waited_for > engine.free_blocks:
            context = sum(one.computed for one in engine.running)
            host = HostRoom(engine.free_host_blocks, setup.block_s, setup.block_tokens)
            rules = VictimRules(
                self._tiers.top_rank,
                setup.prompt_token_s,
                setup.model.step_s(len(engine.running), context),
                engine.chunk_tokens,
                host if setup.host_blocks else None,
            )
            streams = [self._stream(engine, one) for one in engine.running]
            if not (victims := rules.choose([*streams, *others], engine.free_blocks)):
                return
            by_name = {one.asked.name: one for one in engine.running}
            for name, _, by in victims:
                engine.take(by_name[name], by)

    def _guaranteed(self, engine: PressedEngine) -> list[Stream]:
        top_rank, block_tokens = self._tiers.top_rank, engine.setup.block_tokens
        tops = [one for one in engine.waiting if one.rank == top_rank]
        if not tops or not (kept := self._kept_tokens(engine)):
            return []
        lower = sum(engine.held(one) for one in engine.running if one.rank < top_rank)
        needs = ((one.asked.name, engine.setup.blocks_of(one.length)) for one in tops)
        return guaranteed(needs, top_rank, kept / block_tokens, engine.free_blocks + lower)

    def order(self, engine: PressedEngine) -> list[PressedStream]:
        """Those that may start, as `slo.decode.admission` says."""
        if not engine.waiting:
            return []
        by_name = {one.asked.name: one for one in engine.waiting}
        parked = [self._parked(one, engine.now_s) for one in engine.waiting]
        room = self._room(engine)
        ordered = restore_order(
            parked, self._tiers, self._ageing, engine.now_s, room.holdings, room.pool.tokens
        )
        found = starts(ordered, _Waiters(self, engine, by_name), room, self._tiers, engine.now_s)
        if len(found) == len(parked) and all(one.is_newcomer for one in parked):
            return list(engine.waiting)
        return [by_name[one.request_id] for one in found]

    def _room(self, engine: PressedEngine) -> Room:
        setup, now_s, top_rank = engine.setup, engine.now_s, self._tiers.top_rank
        block_tokens, ahead = setup.block_tokens, setup.blocks_of(HORIZON_STEPS)
        is_parked = any(one.parked_s is not None for one in engine.waiting)
        holders, tokens = engine.holders, setup.blocks * block_tokens
        tops = sum(one.rank == top_rank for one in holders)
        reserve_tokens = self._kept_tokens(engine)
        return Room(
            Pool(tokens, engine.free_blocks * block_tokens),
            [self.holding(engine, one) for one in holders],
            [one.rank for one in engine.running] if is_parked else [],
            reserve_tokens,
            self._reserve.part(now_s) * tokens,
            ahead * block_tokens,
            setup.max_seqs - len(holders) if top_rank else math.inf,
            self._reserve.places_kept(setup.max_seqs, tops, now_s) if top_rank else 0,
            restores=_restores(engine),
            unused=self.unused,
            chances=self._chances,
        )

    def admits(self, engine: PressedEngine, one: PressedStream) -> bool:  # noqa: ARG002 - a way's
        """Whoever is in the order."""
        return True

    def has_room(self, engine: PressedEngine, one: PressedStream) -> bool:
        """Whether a stream that runs elsewhere could start here beside those that have memory."""
        room, newcomer = self._room(engine), self.holding(engine, one)
        is_top = one.rank == self._tiers.top_rank
        if is_top and room.keeps(newcomer.tokens):
            return True
        return room.pool.fits(room.holdings, newcomer, 0.0 if is_top else room.unused_tokens)

    def victim(self, engine: PressedEngine) -> PressedStream:
        """What is left to vLLM: the lowest tier's last."""
        return max(engine.running, key=lambda one: (-one.rank, one.asked.at_s))

    def preempted(self, engine: PressedEngine) -> None:
        """Nothing follows from it."""

    def leaves_out(self, engine: PressedEngine) -> frozenset[PressedStream]:  # noqa: ARG002 - a way's
        """Nobody."""
        return frozenset()

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Nothing is learned from it."""

    def is_borne(self, engine: PressedEngine, one: PressedStream, others: list[PressedStream]) -> bool:  # noqa: ARG002
        """Whether the pace of the others bears a newcomer: always."""
        return True

    def ended(self, one: PressedStream) -> None:
        """An answer's length is known."""
        self.lengths.ended(one.asked.tier, "", one.emitted)

    def load(self, engine: PressedEngine) -> DecodeLoad:
        """What the router is told, as `decode_node.engine.report` tells it."""
        known = [*engine.holders, *engine.waiting]
        return DecodeLoad(
            engine.setup.blocks * engine.setup.block_tokens,
            0,
            int(self.unused * self._kept_tokens(engine)),
            engine.step_s,
            {JobId(one.asked.name): self.expected(engine, one) for one in known},
            {tier: self.lengths.whole(tier, "", _LONGEST) for tier in self._tiers.names},
        )

    def _kept_tokens(self, engine: PressedEngine) -> float:
        """Memory that is kept for the top tier."""
        held = sum(engine.held(other) for other in engine.holders if other.rank == self._tiers.top_rank)
        part = held / engine.setup.blocks
        self._reserve.observe(part, engine.now_s)
        if self._tiers.top_rank == 0:
            return 0.0
        return self._reserve.kept(part, engine.now_s) * engine.setup.blocks * engine.setup.block_tokens

    def _stream(self, engine: PressedEngine, one: PressedStream) -> Stream:
        ahead = min(one.length - 1 + HORIZON_STEPS, one.asked.prompt + one.asked.most)
        next_blocks = engine.next_blocks(one)
        return Stream(
            one.asked.name,
            one.rank,
            one.weight,
            one.computed,
            engine.held(one),
            next_blocks,
            max(next_blocks, engine.setup.blocks_of(ahead) - engine.held(one)),
            one.emitted - one.started,
            one.preemptions,
            one.credit_s(engine.now_s),
        )

    @staticmethod
    def _parked(one: PressedStream, now_s: float) -> Parked:
        since_s = one.asked.at_s if one.parked_s is None else one.parked_s
        is_newcomer = one.parked_s is None
        return Parked(
            one.asked.name,
            one.asked.tier,
            since_s,
            is_newcomer,
            one.preemptions,
            one.credit_s(now_s),
            one.length,
        )

    def holding(self, engine: PressedEngine, one: PressedStream) -> Holding:
        """What a request holds, or would hold, and for how much more memory is kept."""
        return self._reckoned(engine, one, self.lengths.remaining)

    def expected(self, engine: PressedEngine, one: PressedStream) -> Holding:
        """What a request holds, or would hold, and how much more it is expected to take."""
        return self._reckoned(engine, one, self.lengths.expected)

    @staticmethod
    def _reckoned(
        engine: PressedEngine, one: PressedStream, to_come: Callable[[Tier, str, int, int], int]
    ) -> Holding:
        remaining = to_come(one.asked.tier, "", one.emitted, one.asked.most - one.emitted)
        blocks = max(engine.held(one), engine.setup.blocks_of(one.length))
        waits = not engine.held(one)
        return Holding(blocks * engine.setup.block_tokens, remaining, one.rank, waits)


@dataclass(frozen=True, slots=True)
class _Waiters:
    """Those that wait for memory before one step."""

    way: Ours
    engine: PressedEngine
    by_name: Mapping[str, PressedStream]

    def holding(self, parked: Parked) -> Holding:
        """What it would hold, and how much more it will take."""
        return self.way.holding(self.engine, self.by_name[parked.request_id])

    def prefix_tokens(self, parked: Parked) -> int:  # noqa: ARG002 - nobody shares any here
        """Nothing."""
        return 0

    def is_computed_again(self, parked: Parked) -> bool:
        """Whether what it has lost is not in host memory."""
        return not (parked.is_newcomer or self.by_name[parked.request_id].swapped)

    def is_borne(self, parked: Parked, starts: Sequence[Parked]) -> bool:
        """Whether the pace of those that have memory, and of those that start before it, bears it."""
        others = [*self.engine.holders, *(self.by_name[one.request_id] for one in starts)]
        return self.way.is_borne(self.engine, self.by_name[parked.request_id], others)


def _restores(engine: PressedEngine) -> bool:
    return any(one.preemptions and one.length - one.computed > 1 for one in engine.running)
