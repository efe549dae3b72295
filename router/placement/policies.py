"""Placement policies: which of the usable prefill replicas takes a request.

Each policy is one small class behind `PlacementPolicy`; a policy sees replicas and a request, reads no clock
and changes nothing. Here are the plain ones and their terms; `router.placement.least_harm` is the default,
`router.placement.registry` knows them all by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from router.fleet.prefill_replica import PrefillView
from router.fleet.queue_forecast import plan, prospect
from router.messages import PlacementReason
from slo.queue.prefill import Prefill
from slo.request import JobId, ReplicaId

_NEW = JobId("")
Draw: TypeAlias = "Callable[[int], int]"


@dataclass(frozen=True, slots=True)
class NewPrefill:
    """The prefill to be placed.

    Attributes:
        deadline_s: When it must end; infinite for never.
        weight: Value of its being on time.
        cached_tokens: Of its leading tokens, those that a replica's prefix cache is expected to hold;
            replicas with none are left out.
    """

    tokens: int
    deadline_s: float
    weight: float
    cached_tokens: Mapping[ReplicaId, int] = field(default_factory=dict)

    def own_s(self, replica: PrefillView) -> float:
        """Its work on a replica."""
        cached = self.cached_tokens.get(replica.replica_id, 0)
        return replica.predictor.prefill_s(self.tokens - cached, cached)


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica chosen, what is expected there, and why.

    Attributes:
        start_s: When the prefill would start.
        end_s: When it would end.
        stops: Whose pass, which runs there, is stopped for it, so that it goes first and tells how long its
            way takes; None where that was not looked at.
    """

    replica: PrefillView
    start_s: float
    end_s: float
    reason: PlacementReason
    stops: JobId | None = None


class PlacementPolicy(Protocol):
    """Chooses one of at least one replica."""

    def choose(self, prefill: NewPrefill, replicas: Sequence[PrefillView], now_s: float) -> Choice:
        """Choose a replica for `prefill`; `replicas` is not empty and in a stable order."""
        ...


class RoundRobin:
    """Takes the replicas in turn, whatever they have to do."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prefill: NewPrefill, replicas: Sequence[PrefillView], now_s: float) -> Choice:
        """See `PlacementPolicy`."""
        replica = replicas[self._next % len(replicas)]
        self._next += 1
        return _choice(replica, prefill, now_s, PlacementReason.ROUND_ROBIN)


class LeastOutstandingTokens:
    """Takes the replica with the fewest prompt tokens still to do, deadlines aside."""

    def choose(self, prefill: NewPrefill, replicas: Sequence[PrefillView], now_s: float) -> Choice:
        """See `PlacementPolicy`."""
        replica = min(replicas, key=lambda candidate: candidate.outstanding_tokens)
        return _choice(replica, prefill, now_s, PlacementReason.LEAST_TOKENS)


class PowerOfTwoChoices:
    """Of two replicas drawn at random, the one with fewer prompt tokens still to do (Mitzenmacher, 2001).

    Args:
        draw: Draws a whole number from 0 to below its argument.
    """

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, prefill: NewPrefill, replicas: Sequence[PrefillView], now_s: float) -> Choice:
        """See `PlacementPolicy`."""
        if len(replicas) == 1:
            return _choice(replicas[0], prefill, now_s, PlacementReason.ONLY_REPLICA)
        first = self._draw(len(replicas))
        second = self._draw(len(replicas) - 1)
        pair = replicas[first], replicas[second + (second >= first)]
        replica = min(pair, key=lambda candidate: candidate.outstanding_tokens)
        return _choice(replica, prefill, now_s, PlacementReason.TWO_CHOICES)


class PrefixAffinity:
    """Takes the replica that has the most of the prompt in its prefix cache; of equals the fewest tokens."""

    def choose(self, prefill: NewPrefill, replicas: Sequence[PrefillView], now_s: float) -> Choice:
        """See `PlacementPolicy`."""
        cached = prefill.cached_tokens
        replica = min(
            replicas, key=lambda replica: (-cached.get(replica.replica_id, 0), replica.outstanding_tokens)
        )
        has_prefix = replica.replica_id in cached
        reason = PlacementReason.LONGEST_PREFIX if has_prefix else PlacementReason.LEAST_TOKENS
        return _choice(replica, prefill, now_s, reason)


def _choice(replica: PrefillView, prefill: NewPrefill, now_s: float, reason: PlacementReason) -> Choice:
    """A choice of `replica`, with what is predicted there."""
    work = replica.outstanding(now_s)
    found = prospect(work, queued(prefill, prefill.own_s(replica), now_s), plan(work).value)
    return Choice(replica, found.start_s, found.end_s, reason)


def queued(prefill: NewPrefill, own_s: float, now_s: float) -> Prefill:
    """A new prefill as one of a replica's queue."""
    return Prefill(_NEW, prefill.weight, prefill.deadline_s, own_s, now_s)
