"""What moving suspended prefills to idle replicas could gain, on eight prefill replicas in virtual time.

A replica that has nothing to do takes the suspended step that is due first from one that runs something else,
with its KV and its checkpoint. Once for nothing and at once, which is the most that any way of doing it can
gain, and once over a link. Placement by the router's own rule, and in turns, which leaves more imbalance than
a router would. Prints tables and writes results/cores/migration.json:

    python -m benchmarks.cores.placement.migration [--seeds 4]
"""
# ruff: noqa: SLF001 - what is tried here is not a part of the simulator

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.cores.placement.routing import PRESET, REPLICAS, REQUESTS, Asked, fleet_of, stream_of
from benchmarks.report import print_rows, write
from prefill_node.engine.stepping.suspension import SuspendedStep
from prefill_node.replica.governing.ledger import Accepted
from simulator.findings import State
from simulator.fleet.fleet import _Fleet
from simulator.fleet.prefill_site import PrefillSite
from simulator.replica.replica import VirtualReplica
from simulator.study.presets import PRESETS
from slo.predict.handoff import INSTANT_LINK, Link

LOADS: Final = (0.9, 1.0, 1.1, 1.2, 1.35)
PLACEMENTS: Final = ("least_harm", "round_robin")
LINKS: Final[dict[str, Link | None]] = {
    "none": None,
    "for nothing": INSTANT_LINK,
    "over 25 GB/s": Link(bytes_ps=25e9, latency_s=0.005),
}


class Migrations:
    """Has the replicas of a fleet take suspended steps from each other.

    Attributes:
        moved: How many steps they took.
    """

    def __init__(self, fleet: _Fleet, link: Link, kv_bytes: float, checkpoint_bytes: float) -> None:
        self.moved = 0
        self._fleet = fleet
        self._link = link
        self._kv_bytes = kv_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self._names = itertools.count(-1, -1)
        self._expecting: set[int] = set()
        self._is_moving = False
        for site in fleet._places:
            of = site.replica
            assert isinstance(of, VirtualReplica)
            of._issue = partial(self._issued, of._issue)  # type: ignore[method-assign]

    def _issued(self, issue: Any) -> None:
        issue()
        if self._is_moving:
            return
        self._is_moving = True
        for idle in self._fleet._places:
            if self._is_idle(idle) and (found := min(self._movable(), key=_due, default=None)) is not None:
                self._move(*found, idle)
        self._is_moving = False

    def _is_idle(self, site: PrefillSite) -> bool:
        engine = _of(site).engine
        return engine.issued is None and not engine.requests and id(site) not in self._expecting

    def _movable(self) -> Iterator[tuple[PrefillSite, SuspendedStep]]:
        for site in self._fleet._places:
            engine = _of(site).engine
            if engine.issued is not None:
                yield from ((site, step) for step in engine._suspensions.steps if step.members)

    def _move(self, source: PrefillSite, step: SuspendedStep, target: PrefillSite) -> None:
        engine, ledger, now_s = _of(source).engine, _of(source).ledger, self._fleet._loop.now_s
        engine._view = None
        engine._suspensions.steps.remove(step)
        times, jobs = engine._times.pop(step.step_id), [engine.requests[name] for name in step.members]
        accounts = [engine._suspensions.accounts.get(job.request_id) for job in jobs]
        accepted = [ledger.accepted[job.job_id] for job in jobs]
        for job in jobs:
            engine.running.remove(job)
            engine.release(job)
            ledger.ended(job.job_id)
            source.here.pop(job.request_id)
        source.reporter.changed()
        done = sum(job.num_computed_tokens for job in jobs) + step.done * step.tokens
        size_bytes = done * self._kv_bytes + step.tokens * self._checkpoint_bytes
        moved = replace(step, step_id=next(self._names), preempted_by="")
        self._expecting.add(id(target))
        self.moved += 1
        at_s = now_s + self._link.alone_s(size_bytes)
        self._fleet._loop.call_at(at_s, self._arrive, target, moved, times, jobs, accounts, accepted)

    def _arrive(
        self,
        target: PrefillSite,
        step: SuspendedStep,
        times: Any,
        jobs: list[Any],
        accounts: list[Any],
        accepted: list[Accepted],
    ) -> None:
        self._expecting.discard(id(target))
        target._life.catch_up()
        of, now_s = _of(target), self._fleet._loop.now_s
        engine = of.engine
        for job, account, known in zip(jobs, accounts, accepted, strict=True):
            of.ledger.arrived(known)
            engine.requests[job.request_id] = job
            engine.running.append(job)
            if not engine._allocate(job, job.num_computed_tokens + step.members[job.request_id]):
                raise RuntimeError("a migrated prefill found no memory")
            engine._stepper.job_arrived(job.job_id, job.request_id, engine._queues.arrived(job), now_s)
            if account is not None:
                engine._suspensions.accounts[job.request_id] = account
            target.here[job.request_id] = job
            job.enter(State.SUSPENDED, now_s)
        engine._view = None
        engine._times[step.step_id] = times
        engine._suspensions.steps.append(step)
        target.reporter.changed()
        if engine.issued is None:
            of._issue()
        else:
            of._decide()


def _of(site: PrefillSite) -> VirtualReplica:
    assert isinstance(site.replica, VirtualReplica)
    return site.replica


def _due(found: tuple[PrefillSite, SuspendedStep]) -> float:
    site, step = found
    return min(_of(site).engine.requests[name].deadline_s for name in step.members)


def attainment(placement: str, moves: str, load: float, seed: int, requests: int) -> tuple[float, float, int]:
    """Fractions in time, of all requests and of the kind that fares worst, and how many steps moved."""
    asked = Asked(PRESETS[PRESET], requests, seed, refuses=False)
    fleet = _Fleet(fleet_of(asked, placement), stream_of(asked, load))
    migrations, link = None, LINKS[moves]
    if link is not None:
        hardware = asked.preset.hardware
        kv_bytes, kept_bytes = hardware.cost.shape.kv_bytes_per_token, hardware.checkpoint_bytes_per_token
        migrations = Migrations(fleet, link, kv_bytes, kept_bytes)
    served = fleet.run(())
    met: dict[str, list[bool]] = {}
    for job in served.jobs:
        met.setdefault(job.arrival.kind, []).append(job.is_on_time)
    worst = min(float(np.mean(flags)) for flags in met.values())
    return served.attainment, worst, 0 if migrations is None else migrations.moved


def main() -> None:
    """Simulate everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    seeds = range(1, asked.seeds + 1)
    rows = []
    with ProcessPoolExecutor(asked.workers) as pool:
        cases = [*itertools.product(PLACEMENTS, LOADS, LINKS)]
        running = {
            (placement, load, moves): [
                pool.submit(attainment, placement, moves, load, seed, asked.requests) for seed in seeds
            ]
            for placement, load, moves in cases
        }
        for (placement, load, moves), futures in running.items():
            met, worst, moved = np.mean([each.result() for each in futures], axis=0)
            rows.append(
                {
                    "placement": placement,
                    "load": load,
                    "moved": moves,
                    "in_time": float(met),
                    "worst_kind_in_time": float(worst),
                    "moves_per_request": float(moved) / asked.requests,
                }
            )
            print(rows[-1], flush=True)
    print_rows("In time with suspended prefills that move", rows)
    settings = {"preset": PRESET, "replicas": REPLICAS, "requests": asked.requests, "seeds": [*seeds]}
    print(write("cores/migration", {"settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
