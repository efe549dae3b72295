"""What a simulation found, as values that are written to JSON and drawn.

Owns the shape of the results. Nothing here computes or draws.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


class State(enum.StrEnum):
    """What a request is doing on a prefill replica."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in one state, seconds in virtual time."""

    state: State
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Life:
    """One request on the replica whose timeline is shown.

    Attributes:
        due_s: When its first token is due; None for never.
        ended_s: When its first token was there.
        spans: In order of time, without gaps, from its arrival to its end.
    """

    number: int
    kind: str
    tokens: int
    arrived_s: float
    due_s: float | None
    ended_s: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """An arm at one rate.

    Attributes:
        attainment: Fraction of all requests whose first token was in time; so by kind and by tier.
        preemptions: Passes stopped, per request.
        wasted_work: Work done again after stops, as a fraction of all work.
        prompt_tokens_ps: Prompt tokens prefilled per second of virtual time.
        setting: What was tuned for this rate, for example {"chunk_tokens": 2048}.
    """

    rate_rps: float
    attainment: float
    by_kind: Mapping[str, float]
    by_tier: Mapping[str, float]
    preemptions: float
    wasted_work: float
    prompt_tokens_ps: float
    setting: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Blocking:
    """Milliseconds from the decision to stop a pass until it stood still."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ArmFindings:
    """What one arm did.

    Attributes:
        title: Its name for people.
        points: In order of rate.
        goodput_rps: Highest rate at which a fraction of all requests is in time, by that fraction: "0.90".
        blocking: None when it never stopped anything.
        ttft_ms: By kind, the 0th to 100th percentiles of the time to first token at `cdf_rate_rps`.
        timeline: The requests of a few seconds at that rate.
    """

    arm: str
    title: str
    points: Sequence[Point]
    goodput_rps: Mapping[str, float]
    blocking: Blocking | None
    ttft_ms: Mapping[str, Sequence[float]]
    timeline: Sequence[Life] = ()


@dataclass(frozen=True, slots=True)
class Findings:
    """A whole comparison.

    Attributes:
        description: What is simulated, a paragraph.
        assumptions: What the numbers rest on, a sentence each.
        requests: Requests of each simulated stream.
        objective_ms: TTFT objective by kind; None where it differs from request to request.
        cdf_rate_rps: The rate that the distributions and timelines are of.
    """

    preset: str
    title: str
    description: str
    assumptions: Sequence[str]
    seed: int
    requests: int
    objective_ms: Mapping[str, float | None]
    cdf_rate_rps: float
    arms: Sequence[ArmFindings]
    command: str

    def document(self) -> dict[str, Any]:
        """As JSON, with goodput and blocking by arm at the top; null is the time of what was not served."""
        arms = []
        for item in self.arms:
            ttft_ms = {
                kind: [ms if math.isfinite(ms) else None for ms in times]
                for kind, times in item.ttft_ms.items()
            }
            arms.append(asdict(item) | {"ttft_ms": ttft_ms})
        return {
            "preset": self.preset,
            "seed": self.seed,
            "goodput_rps": {item.arm: dict(item.goodput_rps) for item in self.arms},
            "blocking_ms": {
                item.arm: asdict(item.blocking) for item in self.arms if item.blocking is not None
            },
            **asdict(replace(self, arms=())),
            "arms": arms,
        }
