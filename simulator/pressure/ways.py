"""The ways of several servers to bear it when a decode engine's memory runs short, and ours.

Those of vLLM 0.29, SGLang and TensorRT-LLM are models of their rules: who may start, who runs first, and
whose memory is taken. All compute again what they have taken.
"""

from __future__ import annotations

from typing import Final

from simulator.pressure.decoding import PressedStream
from simulator.pressure.engine import PressedEngine
from slo.decode.headroom import DecodeLoad
from slo.decode.output_length import OutputLengths
from slo.decode.predicted_peak import Holding, Pool
from slo.decode.reserve import TopTierReserve
from slo.decode.restore import Parked, restore_order
from slo.decode.victims import HORIZON_STEPS, HostRoom, Stream, VictimRules
from slo.queue.ageing import Ageing
from slo.request import JobId
from slo.tiers import TierSet

_LONGEST: Final = 1 << 20
"""Tokens that no answer has."""


class FirstCome:
    """vLLM's: whoever came last loses its memory, and is first in the queue then.

    Args:
        watermark: Part of the pool that stays free when somebody starts.
    """

    def __init__(self, watermark: float = 0.0) -> None:
        self._watermark = watermark

    def relieve(self, engine: PressedEngine) -> None:
        """Nothing ahead of time."""

    def order(self, engine: PressedEngine) -> list[PressedStream]:
        """As they stand."""
        return list(engine.waiting)

    def admits(self, engine: PressedEngine, one: PressedStream) -> bool:
        """Whoever leaves the watermark."""
        left = engine.free_blocks - engine.setup.blocks_of(one.length)
        return left >= self._watermark * engine.setup.blocks or not engine.running

    def victim(self, engine: PressedEngine) -> PressedStream:
        """The last."""
        return engine.running[-1]

    def preempted(self, engine: PressedEngine) -> None:
        """Nothing is learned from it."""

    def ended(self, one: PressedStream) -> None:
        """Nor from that."""


class ByPriority(FirstCome):
    """vLLM's with priorities: the lowest tier's last comer, and the higher tier starts first."""

    def order(self, engine: PressedEngine) -> list[PressedStream]:
        """By tier, then by arrival."""
        return sorted(engine.waiting, key=lambda one: (-one.rank, one.asked.at_s))

    def victim(self, engine: PressedEngine) -> PressedStream:
        """The lowest tier's last comer."""
        return max(engine.running, key=lambda one: (-one.rank, one.asked.at_s))


class LeastComputed(FirstCome):
    """Whose computation is the least: the simplest rule of vLLM's RFC 54644."""

    def victim(self, engine: PressedEngine) -> PressedStream:
        """It."""
        return min(engine.running, key=lambda one: one.computed)


class Retract(FirstCome):
    """SGLang's: whoever has emitted least; who starts is decided by a guess of what answers take."""

    _FIRST: Final = 0.7
    _LEAST: Final = 0.1
    _STEPS: Final = 600

    def __init__(self) -> None:
        super().__init__()
        self._ratio = self._FIRST

    def relieve(self, engine: PressedEngine) -> None:  # noqa: ARG002 - a way's
        """Lower the guess with each step."""
        self._ratio = max(self._LEAST, self._ratio - (self._FIRST - self._LEAST) / self._STEPS)

    def admits(self, engine: PressedEngine, one: PressedStream) -> bool:
        """Whose guess fits beside those of the others."""
        to_come = sum((other.asked.most - other.emitted) * self._ratio for other in engine.running)
        asked = one.length + self._ratio * (one.asked.most - one.emitted)
        return to_come + asked <= engine.free_blocks * engine.setup.block_tokens or not engine.running

    def victim(self, engine: PressedEngine) -> PressedStream:
        """Whoever has emitted least; of those, the longest prompt."""
        return min(engine.running, key=lambda one: (one.emitted, -one.asked.prompt))

    def preempted(self, engine: PressedEngine) -> None:
        """What has been emitted, of what may be, is the new guess."""
        running = engine.running or engine.waiting
        most = sum(one.asked.most for one in running)
        emitted = sum(one.emitted for one in running) + 20 * len(running)
        self._ratio = min(1.0, emitted / most)


class NoEviction(FirstCome):
    """TensorRT-LLM's GUARANTEED_NO_EVICT: nobody starts who might not find room for all that it may have."""

    def admits(self, engine: PressedEngine, one: PressedStream) -> bool:
        """Whose longest answer fits beside those of the others."""
        whole = (
            engine.setup.blocks_of(each.asked.prompt + each.asked.most) for each in (*engine.running, one)
        )
        return sum(whole) <= engine.setup.blocks


class Ours:
    """SlackServe's rules in `slo.decode`, as `decode_node.engine.pressure_scheduler` carries them out.

    Its restores are in chunks as large as any; TPOT objectives leave nobody out of a step.
    """

    def __init__(self, tiers: TierSet) -> None:
        self._tiers = tiers
        self._lengths = OutputLengths()
        self._reserve = TopTierReserve()
        self._ageing = Ageing()

    def relieve(self, engine: PressedEngine) -> None:
        """Take memory ahead of the next steps, by cost."""
        setup = engine.setup
        while sum(engine.next_blocks(one) for one in engine.running) > engine.free_blocks:
            context = sum(one.computed for one in engine.running)
            host = HostRoom(engine.free_host_blocks, setup.block_s, setup.block_tokens)
            rules = VictimRules(
                self._tiers.top_rank,
                setup.prompt_token_s,
                setup.model.step_s(len(engine.running), context),
                setup.chunk_tokens,
                host if setup.host_blocks else None,
            )
            streams = [self._stream(engine, one) for one in engine.running]
            if not (victims := rules.choose(streams, engine.free_blocks)):
                return
            by_name = {one.asked.name: one for one in engine.running}
            for name, _, by in victims:
                engine.take(by_name[name], by)

    def order(self, engine: PressedEngine) -> list[PressedStream]:
        """As `slo.decode.restore`; one at a time is computed again."""
        by_name = {one.asked.name: one for one in engine.waiting}
        parked = [self._parked(one) for one in engine.waiting]
        ordered = [
            by_name[one.request_id] for one in restore_order(parked, self._tiers, self._ageing, engine.now_s)
        ]
        is_computing = any(one.preemptions and one.length - one.computed > 1 for one in engine.running)
        for place, one in enumerate(ordered):
            computes = one.parked_s is not None and not one.swapped
            if computes and is_computing:
                return ordered[:place]
            is_computing = is_computing or computes
        return ordered

    def admits(self, engine: PressedEngine, one: PressedStream) -> bool:
        """Whose predicted peak fits; the top tier within what is kept for it in any case."""
        pool_tokens = engine.setup.blocks * engine.setup.block_tokens
        free_tokens = engine.free_blocks * engine.setup.block_tokens
        kept = self._kept_tokens(engine)
        newcomer = self._holding(engine, one)
        is_top = one.rank == self._tiers.top_rank
        if is_top and newcomer.tokens <= min(kept, free_tokens):
            return True
        holdings = [self._holding(engine, other) for other in engine.holders]
        return Pool(pool_tokens, free_tokens).fit(holdings, newcomer, 0.0 if is_top else kept).fits

    def victim(self, engine: PressedEngine) -> PressedStream:
        """What is left to vLLM: the lowest tier's last."""
        return max(engine.running, key=lambda one: (-one.rank, one.asked.at_s))

    def preempted(self, engine: PressedEngine) -> None:  # noqa: ARG002 - a way's
        """Predict more: it was too little."""
        self._lengths.preempted()

    def ended(self, one: PressedStream) -> None:
        """An answer's length is known."""
        self._lengths.ended(one.asked.tier, "", one.emitted)

    def load(self, engine: PressedEngine) -> DecodeLoad:
        """What the router is told, as `decode_node.engine.report` tells it."""
        known = [*engine.holders, *engine.waiting]
        return DecodeLoad(
            engine.setup.blocks * engine.setup.block_tokens,
            0,
            int(self._kept_tokens(engine)),
            engine.step_s,
            {JobId(one.asked.name): self._holding(engine, one) for one in known},
            {tier: self._lengths.whole(tier, "", _LONGEST) for tier in self._tiers.names},
            self._lengths.factor,
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
    def _parked(one: PressedStream) -> Parked:
        since_s = one.asked.at_s if one.parked_s is None else one.parked_s
        is_newcomer = one.parked_s is None
        return Parked(
            one.asked.name,
            one.asked.tier,
            since_s,
            is_newcomer,
            one.preemptions,
            one.credit_s(since_s),
            one.length,
        )

    def _holding(self, engine: PressedEngine, one: PressedStream) -> Holding:
        asked, most = one.asked, one.asked.most - one.emitted
        remaining = self._lengths.remaining(asked.tier, "", one.emitted, most)
        expected = self._lengths.expected(asked.tier, "", one.emitted, most)
        blocks = max(engine.held(one), engine.setup.blocks_of(one.length))
        waits = not engine.held(one)
        return Holding(blocks * engine.setup.block_tokens, remaining, one.rank, waits, expected)
