"""Whose KV memory is taken when a decode replica runs out of it.

Who costs the least per block: what the others wait while the victim is computed again here, or moved to host
memory and back, what the prefill tier does for it, and what the victim itself is late by; one without an
objective is late by all that it is away. Owns who may be chosen, for whom, in which order, and what becomes
of its KV. What a victim costs is said in seconds times weight, as in `slo.preemption`. Nobody is dropped for
what that costs: only a stream that was chosen as often as anybody may be, and that was promised nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

HORIZON_STEPS: Final = 20
"""When memory is short for the next step, it is freed for so many at once."""
STABLE_TOKENS: Final = 20
"""A stream emits so many tokens after it has started, or started again, before it may be chosen."""
IMMUNE_AFTER: Final = 2
"""A stream that was chosen so often counts as one of the next higher tier, and is not chosen again."""
_DEARER: Final = 1.5
"""What a stream's own wait counts more for each time that it was chosen."""


class VictimReason(enum.StrEnum):
    """Why a stream may be chosen; the values label metrics."""

    COST = "cost"
    """It costs the least."""
    UNSTABLE = "unstable"
    """It has just started, but nobody else is left."""
    IMMUNE = "immune"
    """It was chosen twice already, but nobody else is left."""
    TOP_TIER = "top_tier"
    """It is of the top tier, as is who needs the memory, and nobody else is left."""
    VLLM = "vllm"
    """The engine's own scheduler has chosen it: there was less memory than was known."""
    PARKED = "parked"
    """It has no memory, and has waited for it for too long, see `slo.decode.drop`."""


_IN_ORDER: Final = (VictimReason.COST, VictimReason.UNSTABLE, VictimReason.IMMUNE, VictimReason.TOP_TIER)
"""Each of these counts only where nobody is left for those before it."""


class TakenBy(enum.StrEnum):
    """What becomes of a victim's KV; the values label metrics."""

    SWAP = "swap"
    """It waits in host memory."""
    REPREFILL = "reprefill"
    """The prefill tier computes it again, and it is pulled from there."""
    RECOMPUTE = "recompute"
    """It is computed again here, among the others' tokens."""
    DROP = "drop"
    """Nothing: the stream ends with an error."""


class HostRoom(NamedTuple):
    """Host memory for the KV of victims.

    Attributes:
        free_blocks: That are unused.
        block_s: Seconds to move a block there, or back.
        block_tokens: Of a block.
    """

    free_blocks: int
    block_s: float
    block_tokens: int

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_tokens)


class Stream(NamedTuple):
    """A request that holds KV memory and emits tokens.

    Attributes:
        request_id: The engine's name for it.
        rank: Of its tier, 0 for the lowest.
        weight: Of its tier.
        tokens: Computed so far; what it would have to compute again.
        blocks: That only it holds.
        next_blocks: That it needs for the next step.
        more_blocks: That it needs for the next `HORIZON_STEPS` steps, `room_blocks` included.
        since_start: Tokens that it has emitted since it started, or started again.
        preemptions: How often it was chosen.
        credit_s: By how much it is ahead of its TPOT objective; infinite without one.
        may_leave: Whether the prefill tier can compute its KV again.
        may_drop: Whether it may be ended for good, see `slo.decode.drop`.
        rest_blocks: That its sequence needs after the next step, where somebody starts only beside room for
            them.
    """

    request_id: str
    rank: int
    weight: float
    tokens: int
    blocks: int
    next_blocks: int
    more_blocks: int
    since_start: int
    preemptions: int = 0
    credit_s: float = float("inf")
    may_leave: bool = False
    may_drop: bool = False
    rest_blocks: int = 0

    @property
    def room_blocks(self) -> int:
        """That have to be free for it before the next step."""
        return self.next_blocks + self.rest_blocks


class Victim(NamedTuple):
    """Somebody whose memory is taken, why it may be, and what becomes of its KV."""

    request_id: str
    reason: VictimReason
    by: TakenBy = TakenBy.RECOMPUTE


class _Way(NamedTuple):
    """What may become of a victim's KV.

    Attributes:
        stall_s: For which all others stand still.
        away_s: For which the victim itself emits nothing.
        elsewhere_s: For which the prefill tier has nothing else to do.
    """

    by: TakenBy
    stall_s: float
    away_s: float
    elsewhere_s: float = 0.0


@dataclass(frozen=True, slots=True)
class VictimRules:
    """What a victim costs here.

    Attributes:
        top_rank: The rank of the top tier.
        token_s: Seconds to compute a token again.
        step_s: Seconds of a step without that.
        chunk_tokens: How many are computed again in one step.
        host: Where KV can wait; None where there is nothing of the kind.
        leaves_for: How many times as long a stream is away whose KV the prefill tier computes, as it would
            take to compute it here alone.
    """

    top_rank: int
    token_s: float
    step_s: float
    chunk_tokens: int
    host: HostRoom | None = None
    leaves_for: float = 1.0

    def level(self, stream: Stream) -> int:
        """Its rank, one higher once it is immune."""
        return min(self.top_rank, stream.rank + (stream.preemptions >= IMMUNE_AFTER))

    def cost(self, stream: Stream, others_weight: float) -> float:
        """What it costs to take a stream's memory beside others of that weight, in seconds times weight."""
        return min(self._cost(way, stream, others_weight) for way in self._ways(stream))

    def taken_by(self, stream: Stream, others_weight: float) -> TakenBy:
        """What becomes of its KV: whatever costs the least."""
        return min(self._ways(stream), key=lambda way: self._cost(way, stream, others_weight)).by

    def _ways(self, stream: Stream) -> Iterator[_Way]:
        alone_s = stream.tokens * self.token_s
        if self.host is not None and (blocks := self.host.blocks_of(stream.tokens)) <= self.host.free_blocks:
            moved_s = 2 * blocks * self.host.block_s
            yield _Way(TakenBy.SWAP, moved_s, moved_s + self.step_s)
        if stream.may_leave:
            yield _Way(TakenBy.REPREFILL, 0.0, self.leaves_for * alone_s, alone_s)
        steps = -(-stream.tokens // self.chunk_tokens)
        yield _Way(TakenBy.RECOMPUTE, alone_s, alone_s + steps * self.step_s)

    @staticmethod
    def _cost(way: _Way, stream: Stream, others_weight: float) -> float:
        ahead_s = stream.credit_s if math.isfinite(stream.credit_s) else 0.0
        late_s = max(0.0, way.away_s - ahead_s)
        own = way.elsewhere_s + _DEARER**stream.preemptions * late_s
        return float(way.stall_s * others_weight + stream.weight * own)

    def choose(self, streams: Sequence[Stream], free_blocks: int) -> list[Victim]:
        """Whose memory is taken before the next step; nobody while there is room for all.

        One stream is never chosen, so that somebody makes progress; it is one that is to be dropped only
        where nobody else holds memory. Nor is one alone spared where a higher tier starts with what it has.
        """
        if sum(stream.room_blocks for stream in streams) <= free_blocks:
            return []
        needed_for = max(self.level(stream) for stream in streams if stream.room_blocks)
        keeper = max(
            [] if self._makes_way(streams, free_blocks) else [stream for stream in streams if stream.blocks],
            key=lambda one: (
                not _is_at_limit(one, streams, free_blocks),
                self.level(one),
                one.preemptions,
                one.tokens,
                one.request_id,
            ),
            default=None,
        )
        missing = sum(stream.more_blocks for stream in streams) - free_blocks
        total = sum(stream.weight for stream in streams)
        chosen: list[tuple[Stream, VictimReason]] = []
        for reason in _IN_ORDER:
            candidates = [
                stream
                for stream in streams
                if stream is not keeper and stream.blocks and self._reason(stream, needed_for) is reason
            ]
            candidates.sort(
                key=lambda one: (self.level(one), self.cost(one, total - one.weight) / one.blocks)
            )
            for stream in candidates:
                # Beyond the next step only those are worth it that may be chosen without need.
                if missing <= 0 or (
                    reason is not VictimReason.COST and _enough(streams, chosen, free_blocks)
                ):
                    break
                chosen.append((stream, reason))
                missing -= stream.blocks + stream.more_blocks
        return self._victims(_needed(chosen, missing), streams, free_blocks)

    def _makes_way(self, streams: Sequence[Stream], free_blocks: int) -> bool:
        """Whether one stream alone holds memory, and those of higher tiers can start once it holds none."""
        holders = [stream for stream in streams if stream.blocks]
        if len(holders) != 1:
            return False
        (alone,) = holders
        needed = [one.room_blocks for one in streams if self.level(one) > self.level(alone)]
        return 0 < sum(needed) <= free_blocks + alone.blocks

    def _victims(
        self, chosen: list[tuple[Stream, VictimReason]], streams: Sequence[Stream], free_blocks: int
    ) -> list[Victim]:
        """Them, with host memory for the first ones; nobody is dropped where those before it are enough."""
        rules, victims, gone = self, [], set[str]()
        total = sum(stream.weight for stream in streams)
        for stream, reason in chosen:
            by = rules.taken_by(stream, total - stream.weight)
            if _is_at_limit(stream, streams, free_blocks, gone):
                by = TakenBy.DROP
            victims.append(Victim(stream.request_id, reason, by))
            gone.add(stream.request_id)
            free_blocks += stream.blocks
            if by is TakenBy.SWAP and rules.host is not None:
                left = rules.host.free_blocks - rules.host.blocks_of(stream.tokens)
                rules = replace(rules, host=rules.host._replace(free_blocks=left))
        return victims

    def _reason(self, stream: Stream, needed_for: int) -> VictimReason | None:
        """Why a stream may be chosen; None when it may not."""
        level = self.level(stream)
        if level > needed_for:
            return None
        is_top = stream.rank == self.top_rank or not stream.may_drop
        if level == self.top_rank and needed_for == self.top_rank and self.top_rank and is_top:
            return VictimReason.TOP_TIER
        if stream.preemptions >= IMMUNE_AFTER:
            return VictimReason.IMMUNE
        if stream.since_start < STABLE_TOKENS:
            return VictimReason.UNSTABLE
        return VictimReason.COST


def _enough(streams: Sequence[Stream], chosen: list[tuple[Stream, VictimReason]], free_blocks: int) -> bool:
    """Whether there is room for all that are left."""
    gone = {stream.request_id for stream, _ in chosen}
    needed = sum(stream.room_blocks for stream in streams if stream.request_id not in gone)
    return needed <= free_blocks + sum(stream.blocks for stream, _ in chosen)


def _is_at_limit(
    stream: Stream, streams: Sequence[Stream], free_blocks: int, gone: AbstractSet[str] = frozenset()
) -> bool:
    """Whether it is to be dropped: chosen as often as it may be, and tiers above it still lack a block.

    They lack one that have too few for the next step; for room beyond that nobody is dropped.

    Args:
        stream: It.
        streams: All.
        free_blocks: Those of whoever is gone included.
        gone: Victims before it.
    """
    if not stream.may_drop or stream.preemptions < IMMUNE_AFTER:
        return False
    above = (one.next_blocks for one in streams if one.rank > stream.rank and one.request_id not in gone)
    return sum(above) > free_blocks


def _needed(chosen: list[tuple[Stream, VictimReason]], missing: int) -> list[tuple[Stream, VictimReason]]:
    """Those without whom too little would be free, the dearest left out first."""
    kept = list(chosen)
    for one in reversed(chosen):
        gain = one[0].blocks + one[0].more_blocks
        if missing + gain <= 0:
            kept.remove(one)
            missing += gain
    return kept
