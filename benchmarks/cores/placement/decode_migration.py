"""What moving streams to other decode replicas could gain when memory runs short, on four in virtual time.

A stream that would lose its memory goes to the replica with the most room: if its peak is predicted to fit
there, or whenever there is room for its next steps. It does so for nothing and at once, which is the most
that any way of doing it can gain. Llama 3 8B on A100s, three tiers
in bursts; each replica has half of the memory that a quarter of the requests holds at the fullest. Placement
by the router's own rule, with reports every half second, and in turns, which leaves more imbalance than a
router would. Prints a table and writes results/cores/decode_migration.json:

    python -m benchmarks.cores.placement.decode_migration [--seeds 4]
"""
# ruff: noqa: SLF001 - what is tried here is not a part of the simulator

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final

from benchmarks.cores.pool_pressure import KINDS, MOST, arrivals, fullest, on_a100, outcome
from benchmarks.report import print_rows, write
from router.fleet.decode_replica import DecodeView, Newcomer, choose_decode
from simulator.pressure.decoding import PressedRequest, PressedStream
from simulator.pressure.engine import PressedEngine, PressedSetup
from simulator.pressure.ways import Ours
from slo.decode.victims import HORIZON_STEPS, TakenBy
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS

REPLICAS: Final = 4
REPORT_S: Final = 0.5
POOL: Final = 0.5
PLACEMENTS: Final = ("router", "in turns")
MOVES: Final = ("", "where its peak fits", "where there is room")


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
        self._placed = 0

    def run(self, asked: Sequence[PressedRequest]) -> None:
        """Serve all of them."""
        due = sorted(asked, key=lambda one: one.at_s)
        due.reverse()
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
        """The other replica with the most room, if it has enough for the stream."""
        if not self._moves:
            return None
        others = [engine for engine in self.engines if engine is not source]
        target = max(others, key=lambda engine: engine.free_blocks)
        needed = target.setup.blocks_of(one.length + HORIZON_STEPS)
        has_room = needed <= target.free_blocks and len(target.running) < target.setup.max_seqs
        fits = has_room and (self._moves == MOVES[-1] or target.way.admits(target, one))
        return target if fits else None

    def _place(self, one: PressedRequest) -> None:
        now_s = one.at_s
        if now_s >= self._reported_s + REPORT_S:
            self._reported_s = now_s
            for view, engine in zip(self._views, self.engines, strict=True):
                view.reported(_report(view.replica_id, engine), now_s)
        engine = self.engines[self._chosen(one, now_s)]
        self._placed += 1
        if not engine.running and not engine.waiting:
            engine.now_s = max(engine.now_s, now_s)
        engine.arrives(one)

    def _chosen(self, one: PressedRequest, now_s: float) -> int:
        if self._placement == "in turns":
            return self._placed % REPLICAS
        rank, top = DEFAULT_TIERS.rank(one.tier), DEFAULT_TIERS.top_rank
        newcomer = Newcomer(JobId(one.name), one.tier, one.prompt, 1, MOST, rank == top, rank)
        view = choose_decode(self._views, newcomer, one.tpot_s, None)
        assert view is not None
        view.placed(one.prompt, newcomer, now_s)
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
        self.running.remove(one)
        self._free += self._held.pop(one)
        before = self._before.pop(one, 0)
        if not target.running and not target.waiting:
            target.now_s = max(target.now_s, self.now_s)
        target.running.append(one)
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
    )


def of_seed(seed: int) -> list[dict[str, Any]]:
    """Each placement, without host memory and with it, without moving and with each way of it."""
    quarters = [arrivals(REPLICAS * seed + number) for number in range(REPLICAS)]
    asked = [
        PressedRequest(f"{number}-{one.name}", *_rest(one))
        for number, quarter in enumerate(quarters)
        for one in quarter
    ]
    blocks = round(POOL * statistics.fmean(fullest(quarter) for quarter in quarters))
    rows = []
    for placement in PLACEMENTS:
        for has_host in (False, True):
            for moves in MOVES:
                fleet = Fleet(on_a100(blocks, has_host=has_host), placement, moves)
                fleet.run(asked)
                row = outcome(fleet.engines)
                key = {"placement": placement, "host memory": has_host, "moves": moves}
                rows.append({**key, "seed": seed, **row, "moved": fleet.moved / len(asked)})
    return rows


def _rest(one: PressedRequest) -> tuple[Any, ...]:
    return one.tier, one.at_s, one.prompt, one.answer, one.most, one.ttft_s, one.tpot_s


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["placement"], row["host memory"], row["moves"]), []).append(row)
    numbers = [name for name, value in rows[0].items() if isinstance(value, float)]
    return [
        {
            "placement": placement,
            "host memory": has_host,
            "moves": moves,
            **{name: statistics.fmean(row[name] for row in some) for name in numbers},
        }
        for (placement, has_host, moves), some in found.items()
    ]


def main() -> None:
    """Simulate everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    seeds = range(11, 11 + parser.parse_args().seeds)
    with ProcessPoolExecutor(2) as processes:
        rows = [row for some in processes.map(partial(of_seed), seeds) for row in some]
    mean = means(rows)
    print_rows("moving streams", mean)
    settings = {"seeds": [*seeds], "replicas": REPLICAS, "pool": POOL, "tiers": [*KINDS]}
    print(write("cores/decode_migration", {**settings, "means": mean, "rows": rows}))


if __name__ == "__main__":
    main()
