"""From the signal to the idle device, and to the urgent request's first kernel and first token.

A long prefill is stopped again and again at random moments by a process of its own, and goes on from its
checkpoint. Between, sometimes, an urgent prompt runs: as in a replica, and nobody waits for the device first.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.report import summary

if TYPE_CHECKING:
    import random

    from benchmarks.gpu.signaller import Signaller
    from benchmarks.gpu.variants import Bench, Fitted, Prompt

URGENT_EVERY = 5
_MOST_IN_VAIN = 200


@dataclass(frozen=True, slots=True)
class Moments:
    """When a pass is stopped.

    Attributes:
        count: So many times; the urgent prompt's turns come on top.
        limit_s: No stop is tried after so many seconds, unless none has come in time yet.
        longest_delay_s: Each within so long after the pass has begun or gone on, evenly.
        rng: Draws them.
    """

    count: int
    limit_s: float
    longest_delay_s: float
    rng: random.Random


@dataclass(slots=True)
class Times:
    """What was measured, in milliseconds.

    Attributes:
        decided: From the order to the boundary that noticed it, on the host.
        idle: From the order to the idle device.
        first_kernel: From the last kernel of the stopped pass to the urgent one's first, on the device.
        urgent: From the order to the urgent request's first token.
        unnoticed: Orders that a pass ended under; their time is in `idle` too.
    """

    decided: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    first_kernel: list[float] = field(default_factory=list)
    urgent: list[float] = field(default_factory=list)
    unnoticed: int = 0

    def row(self) -> dict[str, Any]:
        """For the record."""
        return {
            "moments": len(self.idle),
            "unnoticed": self.unnoticed,
            "decided_ms": summary(self.decided),
            "idle_ms": summary(self.idle),
            "first_kernel_ms": summary(self.first_kernel),
            "urgent_ttft_ms": summary(self.urgent),
        }


def stop_latencies(
    bench: Bench,
    fitted: Fitted,
    signaller: Signaller,
    victim: Prompt,
    urgent: Prompt,
    moments: Moments,
) -> Times:
    """Stop a long prompt's pass at random moments; after some of the stops an urgent prompt runs."""
    bench.use(fitted)
    rows = ((victim.name, len(victim)),)
    times, resume, until_s = Times(), None, time.monotonic() + moments.limit_s
    for turn in itertools.count(1):
        is_late = time.monotonic() > until_s and (times.idle or turn > _MOST_IN_VAIN)
        if is_late or len(times.idle) >= moments.count:
            break
        step_id = next(bench.steps)
        signaller.order(step_id, moments.rng.uniform(0.0, moments.longest_delay_s))
        fitted.forward.begin(step_id, lambda: rows, resume)
        bench.decoder(victim.tokens, victim.cache)
        stop = fitted.forward.end()
        resume = None if stop is None else stop.checkpoint
        if stop is not None and turn % URGENT_EVERY == 0:
            token_s = _run_urgent(bench, fitted, urgent, times)
            ordered_s = signaller.ordered_s()
            times.urgent.append((token_s - ordered_s) * 1e3)
            continue
        bench.device.wait()
        idle_s = time.monotonic()
        ordered_s = signaller.ordered_s()
        if stop is not None:
            times.decided.append((stop.stopped_s - ordered_s) * 1e3)
            times.idle.append((idle_s - ordered_s) * 1e3)
        elif ordered_s < idle_s:
            times.unnoticed += 1
            times.idle.append((idle_s - ordered_s) * 1e3)
    return times


def _run_urgent(bench: Bench, fitted: Fitted, urgent: Prompt, times: Times) -> float:
    """Run the urgent prompt behind a stopped pass; when its token is on the host."""
    stopped, first = bench.device.timing_mark(), bench.device.timing_mark()
    stopped.record()
    logits, _ = bench.run(fitted, urgent, first=first)
    int(logits.argmax())
    token_s = time.monotonic()
    times.first_kernel.append(stopped.elapsed_time(first))
    return token_s


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
