"""From the signal to the idle device, and to the urgent request's first kernel and first token.

A long prefill is stopped again and again at random moments by a process of its own, through the board: the
governor's part. It goes on from its checkpoint. Between, sometimes, an urgent prompt runs: as in a replica,
and nobody waits for the device first.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import summary
from prefill_node.board.board import Board
from prefill_node.board.messages import StopOrder

if TYPE_CHECKING:
    from benchmarks.gpu.variants import Bench, Fitted, Prompt

URGENT_EVERY = 5
_MOST_IN_VAIN = 200
_SPIN_S = 0.0005
_GIVE_UP_S = 60.0


@contextmanager
def stopping(board: Board) -> Iterator[Connection]:
    """A process that orders stops.

    It is sent a step and a delay, waits until the step has begun and then for the delay, orders the stop, and
    answers with when it did (CLOCK_MONOTONIC).
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_order_stops, args=(theirs, board.path))
    process.start()
    theirs.close()
    with ours:
        ours.recv()
        yield ours
    process.join(_GIVE_UP_S)


def _order_stops(pipe: Connection, path: Path) -> None:
    with Board.attach(path) as board, suppress(EOFError):
        pipe.send("ready")
        while True:
            step_id, delay_s = pipe.recv()
            _await_step(board, step_id)
            _sleep_exactly(delay_s)
            now_s = time.monotonic()
            board.order_stop(StopOrder(step_id, "urgent", "rescue", now_s))
            pipe.send(now_s)


def _await_step(board: Board, step_id: int) -> None:
    until_s = time.monotonic() + _GIVE_UP_S
    while board.progress(0).step_id < step_id:
        if time.monotonic() > until_s:
            raise TimeoutError(f"step {step_id} has not begun")
        time.sleep(0)


def _sleep_exactly(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    time.sleep(max(0.0, seconds - _SPIN_S))
    while time.monotonic() < until_s:
        pass


def stop_latencies(
    bench: Bench,
    fitted: Fitted,
    stopper: Connection,
    victim: Prompt,
    urgent: Prompt,
    limits: tuple[int, float],
    delays_s: Iterator[float],
) -> dict[str, Any]:
    """Stop a long prompt's pass at random moments; after some of the stops an urgent prompt runs.

    Args:
        bench: The decoder.
        fitted: How it can stop.
        stopper: Orders the stops.
        victim: The long prompt.
        urgent: The other.
        limits: Stops that are wanted, the urgent prompt's turns come on top; and seconds, after which no stop
            is tried unless none has come in time yet.
        delays_s: Each after a pass has begun or gone on.

    Returns:
        Milliseconds. `decided`: from the order to the boundary that noticed it, on the host; `idle`: to the
        idle device, also of the `unnoticed` orders that a pass ended under; `urgent_ttft`: to the urgent
        request's first token; `first_kernel`: on the device, from the last kernel of the stopped pass to the
        urgent one's first.
    """
    count, limit_s = limits
    bench.use(fitted)
    times: dict[str, list[float]] = defaultdict(list)
    resume, unnoticed, until_s = None, 0, time.monotonic() + limit_s
    for turn in itertools.count(1):
        is_late = time.monotonic() > until_s and (times["idle"] or turn > _MOST_IN_VAIN)
        if is_late or len(times["idle"]) >= count:
            break
        step_id = next(bench.steps)
        stopper.send((step_id, next(delays_s)))
        _, stop = bench.run(fitted, victim, resume, step_id=step_id)
        resume = None if stop is None else stop.checkpoint
        if stop is not None and turn % URGENT_EVERY == 0:
            token_s, kernel_ms = _run_urgent(bench, fitted, urgent)
            times["first_kernel"].append(kernel_ms)
            times["urgent_ttft"].append((token_s - stopper.recv()) * 1e3)
            continue
        bench.device.wait()
        idle_s, ordered_s = time.monotonic(), stopper.recv()
        if stop is not None:
            times["decided"].append((stop.stopped_s - ordered_s) * 1e3)
        elif ordered_s < idle_s:
            unnoticed += 1
        else:
            continue
        times["idle"].append((idle_s - ordered_s) * 1e3)
    kinds = ("decided", "idle", "first_kernel", "urgent_ttft")
    measured = {f"{kind}_ms": summary(times[kind]) for kind in kinds}
    return {"moments": len(times["idle"]), "unnoticed": unnoticed, **measured}


def _run_urgent(bench: Bench, fitted: Fitted, urgent: Prompt) -> tuple[float, float]:
    """Run the urgent prompt behind a stopped pass; when its token is on the host, and the gap before it."""
    stopped, first = bench.device.timing_mark(), bench.device.timing_mark()
    stopped.record()
    logits, _ = bench.run(fitted, urgent, first=first)
    int(logits.argmax())
    return time.monotonic(), stopped.elapsed_time(first)


def urgent_alone(bench: Bench, fitted: Fitted, urgent: Prompt, repeats: int) -> dict[str, float]:
    """Milliseconds to the urgent prompt's first token when nothing else runs."""
    bench.use(fitted)
    times = []
    for _ in range(repeats):
        bench.device.wait()
        started_s = time.perf_counter()
        int(bench.run(fitted, urgent)[0].argmax())
        times.append((time.perf_counter() - started_s) * 1e3)
    return summary(times)
