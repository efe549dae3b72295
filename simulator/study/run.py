"""One stream of requests through one replica, without router and decode tier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.arms.arm import Arm
from simulator.replica.hardware import Hardware, ReplicaModel
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.workload.arrivals import Arrival

_AFTER_S: Final = 1e-9
_MARGIN_S: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Run:
    """The requests with their times, the replica, and when the simulation ended."""

    jobs: Sequence[Job]
    replica: ReplicaModel
    ended_s: float


def run(
    arm: Arm,
    hardware: Hardware,
    arrivals: Sequence[Arrival],
    setting: Mapping[str, float] | None = None,
    *,
    traced: bool = False,
    max_misses: float = math.inf,
) -> Run:
    """Serve a stream by one replica; the first token is there when the prefill ends.

    It ends early once more than `max_misses` requests have missed their objective. What happens after the
    last request was due is not simulated: requests that have not been served by then have missed their
    objective, and have no first token.
    """
    loop = EventLoop()
    misses = 0

    def due(job: Job) -> None:
        nonlocal misses
        misses += not job.is_on_time
        if misses > max_misses:
            loop.stop()

    def prefilled(job: Job) -> None:
        job.first_token_s = loop.now_s
        replica.release(job)

    replica = arm.build(loop, hardware, setting or {}, prefilled)
    jobs = []
    for arrival in arrivals:
        deadline_s = math.inf if arrival.ttft_s is None else arrival.at_s + arrival.ttft_s
        job = Job(arrival, hardware.weights[arrival.tier], deadline_s, history=[] if traced else None)
        jobs.append(job)
        loop.call_at(arrival.at_s, replica.arrive, job)
        if deadline_s < math.inf:
            loop.call_at(deadline_s + _AFTER_S, due, job)
    loop.run(max((job.deadline_s for job in jobs if job.deadline_s < math.inf), default=math.inf) + _MARGIN_S)
    return Run(jobs, replica, loop.now_s)
