"""How soon a running prefill stands still, and what the stop costs it, by where it can stop.

One engine for each granularity, on the CPU. Each round prefills a random prompt and orders one stop, at
evenly spread moments; the order goes through the board, as the governor's do, and the stopped step goes on at
once. Wasted is what has to be computed again, as a fraction of the prefill.

    python -m benchmarks.engines.stop_latency [--tokens 1024] [--rounds 30] [--ranks 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from typing import Any

from benchmarks.harness.offline_engine import in_own_process, offline_engine, prefill_s
from benchmarks.report import quantiles, write
from deployments.models.store import ModelStore
from prefill_node.board.events import Stopped, decode
from prefill_node.board.messages import StopOrder
from prefill_node.engine_setup import EngineSetup
from prefill_node.worker.boundary import BoundaryLevel

WORKER = "prefill_node.worker.cpu.PreemptibleCPUWorker"
VOCABULARY = 40_000


def order_after(board: Any, delay_s: float) -> None:
    """Wait for the next step, then order it to stop after a while."""
    before = 0 if (view := board.view()) is None or view.step is None else view.step.step_id
    while (view := board.view()) is None or view.step is None or view.step.step_id == before:
        time.sleep(0.0005)
    time.sleep(delay_s)
    board.order_stop(StopOrder(view.step.step_id, "", "abandoned", time.monotonic()))


def measure(granularity: str, ranks: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One engine; for a process of its own."""
    rng = random.Random(tokens)
    setup = EngineSetup(mode="resume", granularity=granularity)
    model = ModelStore().resolve(None).source
    limits = {"max_model_len": 2 * tokens, "max_num_batched_tokens": 2 * tokens}
    stops: list[Stopped] = []
    with offline_engine(model, WORKER, ranks=ranks, setup=setup, **limits) as (llm, board):

        def prompt() -> list[int]:
            return [rng.randrange(VOCABULARY) for _ in range(tokens)]

        undisturbed_s = [prefill_s(llm, prompt()) for _ in range(4)][1:]
        board.take_events()
        disturbed_s = []
        for number in range(rounds):
            moment_s = (number + 0.5) / rounds * min(undisturbed_s)
            orders = threading.Thread(target=order_after, args=(board, moment_s))
            orders.start()
            disturbed_s.append(prefill_s(llm, prompt()))
            orders.join()
            stops += [it for it in map(decode, board.take_events()) if isinstance(it, Stopped)]
    return {
        "granularity": granularity,
        "ranks": ranks,
        "tokens": tokens,
        "stops": len(stops),
        "undisturbed_s": statistics.median(undisturbed_s),
        "disturbed_s": statistics.median(disturbed_s),
        "order_to_stop_ms": quantiles([(it.stopped_s - it.ordered_s) * 1e3 for it in stops], 50, 90, 100),
        "wasted": statistics.mean(stop.computed - stop.done for stop in stops),
        "max_wasted": max(stop.computed - stop.done for stop in stops),
        "checkpoint_bytes_per_token": max(stop.checkpoint_bytes for stop in stops) / tokens,
    }


def main() -> None:
    """Measure every granularity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    rows = []
    for granularity in BoundaryLevel:
        asked = (granularity.value, arguments.ranks, arguments.tokens, arguments.rounds)
        rows.append(row := in_own_process(measure, *asked))
        print(row, flush=True)
    print(write("engines/stop_latency", {"rows": rows}))


if __name__ == "__main__":
    main()
