"""What moving streams to other decode replicas could gain when memory runs short, on four in virtual time.

A stream that would lose its memory goes to the replica with the most room that can take it: where its peak
is predicted to fit, or wherever its next steps do and nobody of its tier or a higher one waits. It does so
for nothing and at once. Llama 3 8B on A100s, three tiers in bursts, which come to all replicas together or to
each at another time; each has half of the memory that its requests hold at the fullest. Placement by the
router's own rule, with reports every half second, and by replica, where each keeps to its own clients and the
most is left to gain. Prints a table and writes results/cores/decode_migration.json:

    python -m benchmarks.cores.placement.decode_migration [--seeds 4]
"""
# ruff: noqa: SLF001 - what is tried here is not a part of the simulator

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from benchmarks.cores.pool_pressure import KINDS, MOST, arrivals, fullest, on_a100, outcome
from benchmarks.report import print_rows, write
from router.fleet.decode_replica import DecodeView, Newcomer, choose_decode
from simulator.pressure.decoding import PressedRequest, PressedStream
from simulator.pressure.engine import PressedEngine, PressedSetup
from simulator.pressure.ours import Ours
from slo.decode.victims import HORIZON_STEPS, TakenBy
from slo.reports import AwaitedKv, DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS

REPLICAS: Final = 4
REPORT_S: Final = 0.5
POOL: Final = 0.5
MOVES: Final = ("", "where its peak fits", "where nobody waits")
SHIFTS_S: Final = {"together": 0.0, "apart": 35.0 / REPLICAS}
"""Between the bursts of one replica and those of the next."""
CASES: Final = (("together", "router"), ("apart", "router"), ("apart", "by replica"))
"""Bursts, and placement."""


class Fleet:
    """Decode replicas, each with a clock of its own; the one that is furthest behind takes the next step.

    Attributes:
        moved: How many streams have been moved.
    """

    def __init__(self, setup: PressedSetup, placement: str, moves: str) -> None:
        self.moved = 0
        self._placement = placement
        self._moves = moves
        self.engines = [
            _Engine(setup, Ours(DEFAULT_TIERS), DEFAULT_TIERS, fleet=self) for _ in range(REPLICAS)
        ]
        self._views = [DecodeView(ReplicaId(str(number))) for number in range(REPLICAS)]
        self._reported_s = -REPORT_S

    def run(self, asked: Sequence[PressedRequest]) -> None:
        """Serve all of them."""
        due = sorted(asked, key=lambda one: one.at_s, reverse=True)
        while True:
            busy = [engine for engine in self.engines if engine.running or engine.waiting]
            behind = min(busy, key=lambda engine: engine.now_s, default=None)
            if due and (behind is None or due[-1].at_s <= behind.now_s):
                self._place(due.pop())
            elif behind is None:
                return
            else:
                behind.step()

    def roomiest(self, one: PressedStream, source: PressedEngine) -> PressedEngine | None:
        """The other replica with the most room that can take the stream."""
        if not self._moves:
            return None
        able = [engine for engine in self.engines if engine is not source and self._can_take(engine, one)]
        return max(able, key=lambda engine: engine.free_blocks, default=None)

    def _can_take(self, target: PressedEngine, one: PressedStream) -> bool:
        needed = target.setup.blocks_of(one.length + HORIZON_STEPS)
        if needed > target.free_blocks or len(target.running) >= target.setup.max_seqs:
            return False
        if self._moves == MOVES[-1]:
            return all(other.rank < one.rank for other in target.waiting)
        assert isinstance(target.way, Ours)
        return target.way.has_room(target, one)

    def _place(self, one: PressedRequest) -> None:
        now_s = one.at_s
        if now_s >= self._reported_s + REPORT_S:
            self._reported_s = now_s
            for view, engine in zip(self._views, self.engines, strict=True):
                view.reported(_report(view.replica_id, engine), now_s)
        engine = self.engines[self._chosen(one, now_s)]
        if not engine.running and not engine.waiting:
            engine.now_s = max(engine.now_s, now_s)
        engine.arrives(one)

    def _chosen(self, one: PressedRequest, now_s: float) -> int:
        if self._placement == "by replica":
            return int(one.name.partition("-")[0])
        rank, top = DEFAULT_TIERS.rank(one.tier), DEFAULT_TIERS.top_rank
        newcomer = Newcomer(JobId(one.name), one.tier, one.prompt, 1, MOST, rank == top, rank)
        view = choose_decode(self._views, newcomer, one.tpot_s, now_s)
        assert view is not None
        view.placed(newcomer, now_s)
        return self._views.index(view)


class _Engine(PressedEngine):
    """One whose victims are moved, where there is room for them."""

    def __init__(self, *given: Any, fleet: Fleet) -> None:
        super().__init__(*given)
        self._fleet = fleet

    def take(self, one: PressedStream, by: TakenBy) -> None:
        target = self._fleet.roomiest(one, self)
        if target is None:
            super().take(one, by)
            return
        self.way.preempted(self)
        self.running.remove(one)
        self._frees(one)
        before = self._before.pop(one, 0)
        if not target.running and not target.waiting:
            target.now_s = max(target.now_s, self.now_s)
        target.running.append(one)
        target._held[one] = target._free.give_again(one)
        target._give(one, one.length - one.computed)
        target._before[one] = before
        one.started = one.emitted
        self._fleet.moved += 1


def _report(name: ReplicaId, engine: PressedEngine) -> DecodeReported:
    setup = engine.setup
    assert isinstance(engine.way, Ours)
    return DecodeReported(
        name,
        1.0 - engine.free_blocks / setup.blocks,
        len(engine.running) + len(engine.waiting),
        setup.blocks * setup.block_tokens,
        engine.step_s if engine.running else None,
        load=engine.way.load(engine),
        awaited=tuple(
            AwaitedKv(JobId(one.asked.name), one.asked.tier, one.asked.prompt)
            for one in engine.waiting
            if one.parked_s is None
        ),
        caches_prefixes=False,
    )


def of_seed(seed: int) -> list[dict[str, Any]]:
    """Each case, without moving and with each way of it."""
    quarters = [arrivals(REPLICAS * seed + number) for number in range(REPLICAS)]
    blocks = round(POOL * statistics.fmean(fullest(quarter) for quarter in quarters))
    rows = []
    for bursts, placement in CASES:
        asked = [
            PressedRequest(f"{number}-{one.name}", *_rest(one, number * SHIFTS_S[bursts]))
            for number, quarter in enumerate(quarters)
            for one in quarter
        ]
        for moves in MOVES:
            fleet = Fleet(on_a100(blocks, has_host=False), placement, moves)
            fleet.run(asked)
            row = outcome(fleet.engines)
            key = {"bursts": bursts, "placement": placement, "moves": moves, "seed": seed}
            rows.append({**key, **row, "moved": fleet.moved / len(asked)})
    return rows


def _rest(one: PressedRequest, later_s: float) -> tuple[Any, ...]:
    return one.tier, one.at_s + later_s, one.prompt, one.answer, one.most, one.ttft_s, one.tpot_s


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds, and what moving changes in the requests in time per second: least, mean and most."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["bursts"], row["placement"], row["moves"]), []).append(row)
    numbers = [name for name, value in rows[0].items() if isinstance(value, float)]
    summary = []
    for (bursts, placement, moves), some in found.items():
        pairs = zip(some, found[bursts, placement, ""], strict=True)
        gains = [row["goodput"] / without["goodput"] - 1 for row, without in pairs]
        summary.append(
            {
                "bursts": bursts,
                "placement": placement,
                "moves": moves,
                **{name: statistics.fmean(row[name] for row in some) for name in numbers},
                "gain": [min(gains), statistics.fmean(gains), max(gains)],
            }
        )
    return summary


def main() -> None:
    """Simulate everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    seeds = range(11, 11 + parser.parse_args().seeds)
    with ProcessPoolExecutor(2) as processes:
        rows = [row for some in processes.map(of_seed, seeds) for row in some]
    mean = means(rows)
    print_rows("moving streams", mean)
    settings = {"seeds": [*seeds], "replicas": REPLICAS, "pool": POOL, "tiers": [*KINDS]}
    print(write("cores/decode_migration", {**settings, "means": mean, "rows": rows}))


if __name__ == "__main__":
    main()
