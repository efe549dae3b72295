"""How long what is shed stays so before less is tried, in an overload that lasts.

Owns the memory of the last step towards less, and of the one that did not hold. What steps there are is
decided by `slo.monitor.shedding`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from slo.monitor.policy import ClusterPolicy

_NOWHERE: Final = -1.0
_MUCH_LESS: Final = 0.8
"""Of what was asked for when a policy was too loose: it is another situation then."""


@dataclass(frozen=True, slots=True)
class EasingRules:
    """When less is shed.

    Attributes:
        after_s: Shortest time between any change and a step towards less.
        at_most_s: The same for one that has not held, however often; a step towards less has held if none
            towards more follows it so soon.
    """

    after_s: float
    at_most_s: float


class FleetAsked(NamedTuple):
    """What is asked for of prefill and of decode, as parts of what the replicas of each can do."""

    prefill: float
    decode: float

    def is_much_less_than(self, before: FleetAsked) -> bool:
        """Whether it is of what was short before, or was asked for most: of the other there was enough.

        Where both were short both count: what is shed for decode alone is not asked of prefill any more.
        """
        short = min(1.0, max(before))
        return all(now < _MUCH_LESS * then for now, then in zip(self, before, strict=True) if then >= short)


_NOTHING: Final = FleetAsked(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Easing:
    """What is known of steps towards less.

    Each that does not hold costs tiers above some misses. So what was too loose is tried again after twice
    the time each time that it does not hold ("truncated binary exponential backoff"), and after half of it
    each time that it does. All that is forgotten once much less is asked for.

    Attributes:
        was_last: Whether the last change was such a step.
        too_loose: How tight the tightest policy was that did not hold; less than any where all have.
        retry_after_s: Shortest time before one as loose is tried again.
        asked: What is asked for, refused or not.
        asked_then: The same when a step did not hold for the last time.
    """

    was_last: bool = False
    too_loose: float = _NOWHERE
    retry_after_s: float = 0.0
    asked: FleetAsked = _NOTHING
    asked_then: FleetAsked = _NOTHING

    def asking(self, prefill: float, decode: float = 0.0) -> Easing:
        """What is known while so much is asked for, as parts of what the replicas of each kind can do."""
        asked = FleetAsked(prefill, decode)
        if asked.is_much_less_than(self.asked_then):
            return Easing(self.was_last, asked=asked)
        return replace(self, asked=asked)

    def waits_s(self, policy: ClusterPolicy, rules: EasingRules) -> float:
        """Shortest time between the last change and a step down to this policy."""
        return max(rules.after_s, self.retry_after_s if self._has_failed(policy) else 0.0)

    def after_easing(self, before: ClusterPolicy, rules: EasingRules) -> Easing:
        """What is known after a step from `before` towards less: that `before` has held."""
        if not self._has_failed(before):
            return replace(self, was_last=True)
        if self.retry_after_s / 2 <= rules.after_s:
            return Easing(was_last=True, asked=self.asked)
        return replace(self, was_last=True, retry_after_s=self.retry_after_s / 2)

    def after_tightening(self, before: ClusterPolicy, since_change_s: float, rules: EasingRules) -> Easing:
        """What is known after a step from `before` towards more."""
        if not self.was_last:
            return self
        if since_change_s > rules.at_most_s:
            return Easing(asked=self.asked)
        retry_after_s = min(rules.at_most_s, 2 * max(rules.after_s, self.retry_after_s))
        too_loose = max(self.too_loose, tightness(before))
        return Easing(
            too_loose=too_loose, retry_after_s=retry_after_s, asked=self.asked, asked_then=self.asked
        )

    def _has_failed(self, policy: ClusterPolicy) -> bool:
        return tightness(policy) <= self.too_loose


UNTRIED: Final = Easing()


def tightness(policy: ClusterPolicy) -> float:
    """Grows with each step towards more shedding or reserving, and falls with each towards less."""
    return policy.reserved + sum(policy.shed.values())
