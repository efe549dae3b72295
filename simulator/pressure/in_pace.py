"""SlackServe's way on a decode engine whose streams have TPOT objectives: a step leaves streams out.

The rules of `slo.decode.composition` and `slo.decode.newcomers`, asked as `decode_node.engine.pace` asks
them. Learns what steps take from the engine's, as there.
"""

from __future__ import annotations

from simulator.pressure.decoding import PressedStream
from simulator.pressure.engine import PressedEngine
from simulator.pressure.ours import Ours
from slo.decode.composition import MARGIN, Composer, Paced
from slo.decode.newcomers import Newcomers, Starting
from slo.decode.step_time import StepShape, StepTimes
from slo.tiers import TierSet


class InPace(Ours):
    """SlackServe's rules with those for the pace of streams.

    Args:
        tiers: Ranks.
        learns_every: Steps of which one is timed.
    """

    def __init__(self, tiers: TierSet, learns_every: int = 4) -> None:
        super().__init__(tiers)
        self._times = StepTimes()
        self._composer = Composer(self._times)
        self._newcomers = Newcomers(self._times)
        self._learns_every = learns_every
        self._steps = 0
        self._left_out: dict[PressedStream, float] = {}
        """Since when, of those that the step before has left out."""

    def leaves_out(self, engine: PressedEngine) -> frozenset[PressedStream]:
        """Whom the next step leaves out."""
        decoding = {one.asked.name: one for one in engine.running if one.length - one.computed == 1}
        objectives = [one.asked.tpot_s for one in decoding.values() if one.asked.tpot_s is not None]
        if not objectives or not self._times.is_known:
            self._left_out = {}
            return frozenset()
        context = sum(one.computed for one in decoding.values())
        prompt = _prompt_tokens(engine)
        full_s = self._times.predict_s(StepShape(len(decoding), context, prompt))
        if full_s <= MARGIN * min(objectives) and not self._left_out:
            return frozenset()
        paced = [self._paced(one, engine.now_s) for one in decoding.values()]
        names = self._composer.leaves_out(paced, engine.now_s, prompt)
        self._left_out = {decoding[one.request_id]: one.token_s for one in paced if one.request_id in names}
        return frozenset(self._left_out)

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """A step has ended."""
        self._steps += 1
        if not self._times.is_known or self._steps % self._learns_every == 0:
            self._times.observe(shape, seconds)

    def is_borne(self, engine: PressedEngine, one: PressedStream, others: list[PressedStream]) -> bool:
        """Whether the pace of the others bears a newcomer, or it loses an objective of its own by waiting."""
        if all(other.asked.tpot_s is None for other in others):
            return True
        now_s, asked = engine.now_s, one.asked
        tokens = 0 if engine.setup.pulls else one.length
        newcomer = Starting(
            self._paced(one, now_s),
            asked.at_s if one.parked_s is None else one.parked_s,
            self.expected(engine, one).remaining,
            has_first=bool(one.token_s),
            first_due_s=None if asked.ttft_s is None else asked.at_s + asked.ttft_s,
            prompt_tokens=tokens,
            prompt_steps=-(-tokens // engine.setup.chunk_tokens),
            is_top=one.rank == self._tiers.top_rank,
        )
        paced = [self._paced(other, now_s) for other in others]
        return self._newcomers.bears(paced, newcomer, now_s, _prompt_tokens(engine))

    def _paced(self, one: PressedStream, now_s: float) -> Paced:
        token_s = self._left_out.get(one, now_s)
        context = one.computed or one.length
        return Paced(one.asked.name, context, one.asked.tpot_s, one.credit_s(now_s), token_s, one.rank)


def _prompt_tokens(engine: PressedEngine) -> int:
    """What the next step computes of prompts, and of sequences that are computed again."""
    lacks = sum([more for one in engine.running if (more := one.length - one.computed) > 1])
    return min(lacks, engine.chunk_tokens)
