"""The ways of several servers to bear it when a decode engine's memory runs short.

Those of vLLM 0.29, SGLang and TensorRT-LLM are models of their rules: who may start, who runs first, and
whose memory is taken. All compute again what they have taken.
"""

from __future__ import annotations

from typing import Final

from simulator.pressure.decoding import PressedStream
from simulator.pressure.engine import PressedEngine
from slo.decode.step_time import StepShape
from slo.decode.victims import TakenBy


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

    def chunk_tokens(self, engine: PressedEngine) -> int:
        """As configured."""
        return engine.setup.chunk_tokens

    def victim(self, engine: PressedEngine) -> PressedStream:
        """The last."""
        return engine.running[-1]

    def preempted(self, engine: PressedEngine) -> None:
        """Nothing is learned from it."""

    def leaves_out(self, engine: PressedEngine) -> frozenset[PressedStream]:  # noqa: ARG002 - a way's
        """Nobody."""
        return frozenset()

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Nothing is learned from it either."""

    def ended(self, one: PressedStream) -> None:
        """Nor from that."""


def _precedence(one: PressedStream) -> tuple[int, float]:
    """Higher tiers first, and within a tier who came first."""
    return -one.rank, one.asked.at_s


class ByPriority(FirstCome):
    """vLLM's with priorities: the lowest tier's last comer, and the higher tier starts first."""

    def order(self, engine: PressedEngine) -> list[PressedStream]:
        """By tier, then by arrival."""
        return sorted(engine.waiting, key=_precedence)

    def victim(self, engine: PressedEngine) -> PressedStream:
        """The lowest tier's last comer."""
        return max(engine.running, key=_precedence)


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
        return self._missing_tokens(engine, one) <= 0 or not engine.running

    def _missing_tokens(self, engine: PressedEngine, one: PressedStream) -> float:
        """Memory that is not free of what it and the others are guessed to take."""
        to_come = sum(map(self._to_come, engine.running))
        free = engine.free_blocks * engine.setup.block_tokens
        return to_come + one.length + self._to_come(one) - free

    def _to_come(self, one: PressedStream) -> float:
        return self._ratio * (one.asked.most - one.emitted)

    def victim(self, engine: PressedEngine) -> PressedStream:
        """Whoever has emitted least; of those, the longest prompt."""
        return min(engine.running, key=lambda one: (one.emitted, -one.asked.prompt))

    def preempted(self, engine: PressedEngine) -> None:
        """What has been emitted, of what may be, is the new guess."""
        running = engine.running or engine.waiting
        most = sum(one.asked.most for one in running)
        emitted = sum(one.emitted for one in running) + 20 * len(running)
        self._ratio = min(1.0, emitted / most)


class RetractForPriority(Retract):
    """SGLang's with priorities: the higher tier starts first, and takes the memory of lower ones for that.

    Steps that run short take it from whoever has emitted least, whatever its tier.
    """

    def order(self, engine: PressedEngine) -> list[PressedStream]:
        """By tier, then by arrival."""
        return sorted(engine.waiting, key=_precedence)

    def relieve(self, engine: PressedEngine) -> None:
        """Have the first start if lower tiers hold enough; the lowest tier's last comer goes first."""
        super().relieve(engine)
        first = next(iter(self.order(engine)), None)
        if first is None or self.admits(engine, first):
            return
        lower = [one for one in engine.running if one.rank < first.rank]
        missing, taken = self._missing_tokens(engine, first), []
        for one in sorted(lower, key=_precedence, reverse=True):
            taken.append(one)
            missing -= engine.held(one) * engine.setup.block_tokens + self._to_come(one)
            if missing <= 0:
                self._yield(engine, taken)
                return

    def _yield(self, engine: PressedEngine, taken: list[PressedStream]) -> None:
        ratio = self._ratio
        for one in taken:
            engine.take(one, TakenBy.RECOMPUTE)
        self._ratio = ratio  # which memory that runs short raises, not this


class NoEviction(FirstCome):
    """TensorRT-LLM's GUARANTEED_NO_EVICT: nobody starts who might not find room for all that it may have."""

    def admits(self, engine: PressedEngine, one: PressedStream) -> bool:
        """Whose longest answer fits beside those of the others."""
        whole = (
            engine.setup.blocks_of(each.asked.prompt + each.asked.most) for each in (*engine.running, one)
        )
        return sum(whole) <= engine.setup.blocks
