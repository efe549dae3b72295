"""A way to run a prefill replica, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from simulator.replica.hardware import Hardware, ReplicaModel
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop

Build: TypeAlias = "Callable[[EventLoop, Hardware, Mapping[str, float], Callable[[Job], None]], ReplicaModel]"
"""Makes a replica in a loop, on hardware, with a setting; the last is called with each prefilled request."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run a replica.

    Attributes:
        build: Makes a replica, given what was chosen from `settings`.
        settings: What is tuned for each rate; one empty setting for nothing.
    """

    name: str
    title: str
    build: Build
    settings: Sequence[Mapping[str, float]] = ({},)
