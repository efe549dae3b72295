"""Placement policies: which of the usable prefill replicas takes a request.

Each policy is one small class behind `PlacementPolicy`; a policy sees replicas and a request, reads no
clock and changes nothing.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from router.fleet import Fit, PrefillReplica


class PlacementReason(enum.StrEnum):
    """Why a replica was chosen; the values label metrics."""

    ONLY_REPLICA = "only_replica"
    NOBODY_LATE = "nobody_late"
    LEAST_HARM = "least_harm"
    ROUND_ROBIN = "round_robin"
    LEAST_TOKENS = "least_tokens"


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prefill to be placed: its length, when it must end (infinite for never) and its worth."""

    tokens: int
    deadline_s: float
    weight: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica chosen, what is expected of it, and why."""

    replica: PrefillReplica
    fit: Fit
    reason: PlacementReason


class PlacementPolicy(Protocol):
    """Chooses one of at least one replica."""

    def choose(self, prefill: Prefill, replicas: Sequence[PrefillReplica], now_s: float) -> Choice:
        """Choose a replica for `prefill`; `replicas` is not empty and in a stable order."""
        ...


class LeastSlackLoss:
    """Costs the fleet the least: least weighted lateness added, then the earliest end.

    The lateness counts the request's own and that of everyone behind whom it would be put, each weighted
    by its tier. When nobody becomes late anywhere, the replica where the request ends first, and so keeps
    the most slack, takes it.
    """

    def choose(self, prefill: Prefill, replicas: Sequence[PrefillReplica], now_s: float) -> Choice:
        """See `PlacementPolicy`."""
        best, best_fit = replicas[0], _fit(prefill, replicas[0], now_s)
        for replica in replicas[1:]:
            fit = _fit(prefill, replica, now_s, best_fit.lateness_s)
            if (fit.lateness_s, fit.end_s) < (best_fit.lateness_s, best_fit.end_s):
                best, best_fit = replica, fit
        if len(replicas) == 1:
            reason = PlacementReason.ONLY_REPLICA
        else:
            reason = PlacementReason.NOBODY_LATE if best_fit.lateness_s == 0 else PlacementReason.LEAST_HARM
        return Choice(best, best_fit, reason)


class RoundRobin:
    """Takes the replicas in turn, whatever they have to do."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prefill: Prefill, replicas: Sequence[PrefillReplica], now_s: float) -> Choice:
        """See `PlacementPolicy`."""
        replica = replicas[self._next % len(replicas)]
        self._next += 1
        return Choice(replica, _fit(prefill, replica, now_s), PlacementReason.ROUND_ROBIN)


class LeastOutstandingTokens:
    """Takes the replica with the fewest prompt tokens still to do, deadlines aside."""

    def choose(self, prefill: Prefill, replicas: Sequence[PrefillReplica], now_s: float) -> Choice:
        """See `PlacementPolicy`."""
        replica = min(replicas, key=lambda candidate: candidate.outstanding_tokens)
        return Choice(replica, _fit(prefill, replica, now_s), PlacementReason.LEAST_TOKENS)


POLICIES: Final[Mapping[str, Callable[[], PlacementPolicy]]] = {
    "least_slack_loss": LeastSlackLoss,
    "round_robin": RoundRobin,
    "least_outstanding_tokens": LeastOutstandingTokens,
}
"""Policies by the name that the configuration uses."""


def _fit(prefill: Prefill, replica: PrefillReplica, now_s: float, enough_s: float = math.inf) -> Fit:
    return replica.fit(prefill.tokens, prefill.deadline_s, prefill.weight, now_s, enough_s)
