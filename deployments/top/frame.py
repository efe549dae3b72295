"""What `slackserve top` shows, as plain values; `--json` prints their fields as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A prefill replica.

    Attributes:
        replica: Its id.
        work: What it has answered (`prefill_node.replica.governing.snapshot`); None when it has not.
        reports: Whether it reports to the router as often as it should.
        silent_s: Seconds since its last report.
        outstanding: Prefills that it has not finished, for all that the router knows.
        outstanding_tokens: Their prompt tokens.
        kv_usage: Fraction of its KV blocks in use, as last reported.
    """

    replica: str
    work: Mapping[str, Any] | None
    reports: bool
    silent_s: float
    outstanding: int
    outstanding_tokens: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A decode replica: as a `PrefillRow`, with the requests that it had when it last reported."""

    replica: str
    reports: bool
    silent_s: float
    running: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Frame:
    """One look at a deployment.

    Attributes:
        model: What it serves.
        taken_at: When it was looked at.
        ready: Whether both tiers have a warm replica; None when the router does not answer.
        tiers: Those that clients can ask for, the most valuable first; empty until the router has answered.
        monitored: Whether it has an SLO monitor.
        monitor: What the SLO monitor has answered (`deployments.monitor.actor`); None when it has not.
    """

    model: str
    taken_at: datetime
    ready: bool | None
    prefill: tuple[PrefillRow, ...]
    decode: tuple[DecodeRow, ...]
    tiers: tuple[str, ...] = ()
    monitored: bool = False
    monitor: Mapping[str, Any] | None = None
