"""How many replicas the work needs that a fleet has, by what is predicted of it.

Pure. Owns the predictions; when the number of replicas follows them is `slo.autoscaling.scaler`'s.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

CATCH_UP_S: Final = 30.0
"""A backlog may take so long to be worked off, or as long as a replica takes to start, if that is longer."""
_QUEUEING: Final = 0.35
"""Below this part of the fleet's time a missed objective is nothing that more replicas would mend."""
_CROWDED: Final = 0.5
"""Above this part of decode's memory or pace requests may wait for it: what has just begun may hold twice as
much in the end."""
_QUEUE_S: Final = 5.0
"""Who waits behind so much work waits for others, however little arrives by now."""
_WAVES: Final = 2.0
"""Standard deviations of the number that decode together, had all come independently of each other, for
which there is room too."""


class ScaleReason(enum.StrEnum):
    """Why a tier of replicas has the size that it has; the values label log lines."""

    DEMAND = "demand"
    """Of the work that arrives."""
    BACKLOG = "backlog"
    """Of the work that waits, or will until another replica is up."""
    AT_RISK = "at_risk"
    """A tier of requests burns its error budget."""
    MEMORY = "memory"
    PACE = "pace"
    FEWER_SUFFICE = "fewer_suffice"
    NOTHING_TO_DO = "nothing_to_do"
    UNKNOWN = "unknown"
    """Nobody says what there is to do."""


class FleetLoad(enum.Enum):
    """Whether it can be for load that requests are late."""

    LOADED = enum.auto()
    """They may wait for each other."""
    IDLE = enum.auto()
    """None waits for another."""
    UNKNOWN = enum.auto()
    """Nobody says, or it is between the two."""


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """What there is to prefill.

    Attributes:
        work: Predicted work that arrives, seconds per second of the fastest replica; refused work included,
            but for what was refused for decode alone, or for a deadline that no fleet could keep.
        refused: Of `work`, what was refused.
        backlog_s: Predicted work of those that were admitted, have a deadline, and have not been served.
        at_risk: Whether a tier misses its target by first tokens (`slo.monitor.shedding.TierBurn.at_risk`).
        capacity: What the replicas can do, in the unit of `work`; 0 without any, or before the first request.
        replicas: How many there are.
    """

    work: float
    backlog_s: float
    at_risk: bool = False
    capacity: float = 0.0
    refused: float = 0.0
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class DecodeDemand:
    """What there is to decode.

    Attributes:
        memory: KV memory in use once what is on its way has arrived, and what waits for it has it, in that of
            one replica.
        requests: How many decode there, those sent there since the last report included.
        pace: Of how many replicas they take all of the time per output token that the strictest objective
            leaves; 0 when nothing is promised, or more replicas would not mend it.
        replicas: How many there are.
        asked: What would be in use were nobody refused, by memory or pace, whichever is more, in that of one
            replica; 0 when nobody says.
        refused: What would be in use, too, had it not been refused for want of memory or for its tier's share
            of decode; by memory or pace, whichever is more.
    """

    memory: float
    requests: int
    pace: float = 0.0
    replicas: int = 0
    asked: float = 0.0
    refused: float = 0.0

    @property
    def load(self) -> float:
        """What is in use of what they can do, by memory or by pace, whichever is more; 0 without any."""
        return max(self.memory, self.pace) / self.replicas if self.replicas > 0 else 0.0

    @property
    def asked_load(self) -> float:
        """What would be in use were nobody refused, of what they can do; what is in use at least."""
        return max(self.asked / self.replicas, self.load) if self.replicas > 0 else 0.0

    @property
    def is_crowded(self) -> bool:
        """Whether requests may wait for each other there."""
        return self.load > _CROWDED


@dataclass(frozen=True, slots=True)
class FleetDemand:
    """What there is to do for both tiers of replicas."""

    prefill: PrefillDemand
    decode: DecodeDemand

    @property
    def load(self) -> FleetLoad:
        """Whether requests can be late for each other: by what is let in, as nobody waits for the rest."""
        prefill, decode = self.prefill, self.decode
        if prefill.capacity <= 0 or decode.replicas <= 0:
            return FleetLoad.UNKNOWN
        of_prefill = (prefill.work - prefill.refused) / prefill.capacity
        queue_s = prefill.backlog_s / prefill.capacity
        if of_prefill > _QUEUEING or decode.is_crowded or queue_s > _QUEUE_S:
            return FleetLoad.LOADED
        return FleetLoad.IDLE if decode.load <= _QUEUEING else FleetLoad.UNKNOWN


@dataclass(frozen=True, slots=True)
class Need:
    """What work needs.

    Attributes:
        steady: Replicas that would be busy with it all the time.
        at_least: Replicas that it takes in any case, for `reason`.
        usual: Why `steady` is what it is.
        wants_more: Whether a tier of requests misses its target and another replica may mend that: nothing is
            taken away meanwhile.
    """

    steady: float
    at_least: float
    usual: ScaleReason
    reason: ScaleReason
    wants_more: bool = False


def prefill_need(seen: PrefillDemand, running: int, ahead_s: float, start_s: float) -> Need:
    """Of prefill: for what arrives, and for what will wait by the time that another replica is up.

    Args:
        seen: What there is to do.
        running: Replicas that take requests.
        ahead_s: Until those that are starting are up; `start_s` if none is.
        start_s: How long a replica takes to start.
    """
    grows_s = max(0.0, seen.work - running) * ahead_s
    at_least = seen.work + (seen.backlog_s + grows_s) / max(start_s, CATCH_UP_S)
    return Need(
        seen.work,
        at_least,
        ScaleReason.DEMAND,
        ScaleReason.BACKLOG,
        wants_more=seen.at_risk and seen.work > _QUEUEING * running,
    )


def decode_need(seen: DecodeDemand) -> Need:
    """Of decode: for its memory, and for its pace.

    Who is refused for want of it counts: replicas can be full without having all of theirs in use. A wave
    costs every stream its pace, but finds memory that others leave. The room for waves is that of
    square-root staffing (Halfin and Whitt, 1981): for few requests it is a larger part than for many.
    """
    waves = _WAVES / math.sqrt(max(1, seen.requests))
    memory, pace = seen.memory, seen.pace
    if memory > pace:
        memory += seen.refused
    else:
        pace += seen.refused
    pace *= 1 + waves
    usual = ScaleReason.MEMORY if memory >= pace else ScaleReason.PACE
    return Need(max(memory, pace), 0.0, usual, usual)
