"""Exponential decay of running accounts.

What was filed `memory_s` ago counts 1/e of what is filed now. Instead of shrinking everything old at each
entry, new entries are scaled up; once in a while everything is scaled back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_RESCALE_AT: Final = 50.0
"""Time constants after which everything filed is scaled back, before new entries get too large."""


@dataclass(slots=True)
class ExponentialDecay:
    """The scale of one account. Reads no clock; times never go back.

    Attributes:
        memory_s: Time constant of the decay, seconds.
    """

    memory_s: float
    _since_s: float | None = None
    """Entries of this time are filed unscaled."""

    def rescale(self, now_s: float) -> float:
        """What everything filed has to be multiplied by before the next entry; nearly always 1."""
        if self._since_s is None:
            self._since_s = now_s
        age = (now_s - self._since_s) / self.memory_s
        if age <= _RESCALE_AT:
            return 1.0
        self._since_s = now_s
        return math.exp(-age)

    def grown(self, now_s: float) -> float:
        """What an entry is multiplied by; after `rescale` with the same time."""
        since_s = now_s if self._since_s is None else self._since_s
        return math.exp((now_s - since_s) / self.memory_s)

    def kept(self, now_s: float) -> float:
        """What everything filed is multiplied by to be read; 0 after a long silence."""
        since_s = now_s if self._since_s is None else self._since_s
        return math.exp((since_s - now_s) / self.memory_s)
