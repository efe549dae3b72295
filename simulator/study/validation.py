"""The simulator against a recording of a real server.

Owns the form of a recording and the comparison. What a prompt takes alone, from its sending to its first
token, is taken from the recording; what several do to each other is what is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import msgspec
import numpy as np

from simulator.arms.arms import ARMS
from simulator.cost.accelerators import MODELS, calibrated_cost_model
from simulator.cost.operators import Measured
from simulator.replica.hardware import Hardware
from simulator.study.run import run
from simulator.workload.arrivals import Arrival
from slo.predict.prefill_time import Sample, fit
from slo.tiers import STANDARD, Tier

EMBEDDED = MODELS["smollm2-135m"]
_ALL_SERVED_S: Final = 3600.0
"""So long after the last request one more arrives: what was due before is late, and served."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request of the recording: when it was sent, what it was, and its time to first token, seconds."""

    at_s: float
    kind: str
    tier: str
    tokens: int
    objective_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Recording:
    """What a real server did.

    Attributes:
        arm: How the server ran, a name out of `simulator.arms.arms.ARMS`.
        prefill: (prompt tokens, seconds) of prefills that had the prefill replica to themselves.
        alone: (prompt tokens, seconds to the first token) of prompts that had the server to themselves.
        requests: In order of sending.
        layers: Of the embedded model, so many were served.
        load: The fraction of the time that the prefills alone would have taken.
        preemptions: How often a request was stopped.
    """

    arm: str
    prefill: list[tuple[int, float]]
    alone: list[tuple[int, float]]
    requests: list[Recorded]
    layers: int
    load: float
    preemptions: int

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @staticmethod
    def of(document: Mapping[str, Any]) -> Recording:
        """From what `document` gave."""
        return msgspec.convert({field.name: document[field.name] for field in fields(Recording)}, Recording)


def hardware(recording: Recording) -> Hardware:
    """A replica with the prefill times that were measured, whose host time is in them.

    Long prompts were measured in the chunks in which the server computes them, each with a fixed part of its
    own: what these add is not a single pass's.
    """
    whole = _calibrated(recording.layers, recording.prefill)
    single = [
        (tokens, seconds - (lone_s(recording.arm, whole, tokens) - whole.cost.prefill_s(tokens)))
        for tokens, seconds in recording.prefill
    ]
    return _calibrated(recording.layers, single)


def _calibrated(layers: int, prefill: Sequence[tuple[int, float]]) -> Hardware:
    """A replica of the embedded model's first layers, from (tokens, seconds) of prompts in one pass each."""
    predictor = fit([Sample(tokens, seconds) for tokens, seconds in prefill]).predictor
    return Hardware(calibrated_cost_model(replace(EMBEDDED, layers=layers), predictor), on_host=True)


def lone_s(arm: str, replica: Hardware, tokens: int) -> float:
    """Seconds of a prompt that has the replica to itself, in the chunks of the arm."""
    (job,) = run(ARMS[arm], replica, [Arrival(0, 0.0, "", tokens, 1, _ALL_SERVED_S, STANDARD)]).jobs
    return job.ttft_s


def simulated(recording: Recording) -> tuple[list[float], int]:
    """The times to first token that the simulator foretells, in order, and how often it stops a request."""
    replica = hardware(recording)
    handoff = Measured([(t, s - lone_s(recording.arm, replica, t)) for t, s in recording.alone])
    arrivals = [
        Arrival(
            number,
            request.at_s,
            request.kind,
            request.tokens,
            output_tokens=1,
            ttft_s=request.objective_s - handoff(request.tokens),
            tier=Tier(request.tier),
        )
        for number, request in enumerate(recording.requests)
    ]
    last = replace(arrivals[-1], number=len(arrivals), at_s=arrivals[-1].at_s + _ALL_SERVED_S)
    *jobs, _ = run(ARMS[recording.arm], replica, [*arrivals, last]).jobs
    times_s = [job.ttft_s + handoff(job.num_tokens) for job in jobs]
    return times_s, sum(job.preemptions for job in jobs)


def faster(recording: Recording, part: float) -> Recording:
    """The same with prefills that take only that part of their time: how much hangs on what was measured."""
    before = Measured(recording.prefill)
    return replace(
        recording,
        prefill=[(tokens, part * seconds) for tokens, seconds in recording.prefill],
        alone=[(tokens, seconds - (1 - part) * before(tokens)) for tokens, seconds in recording.alone],
    )


def compare(recording: Recording) -> dict[str, tuple[float, float]]:
    """Measured and simulated.

    Of the time to first token the quantiles, seconds; the fractions in time of all and of each kind; and how
    often requests were stopped.
    """
    ours, preemptions = simulated(recording)
    both = [request.ttft_s for request in recording.requests], ours
    met = [
        [ttft_s <= request.objective_s for request, ttft_s in zip(recording.requests, times, strict=True)]
        for times in both
    ]
    found = {f"p{p}": _pair(np.percentile(times, p) for times in both) for p in (50, 95)}
    found["in time"] = _pair(map(np.mean, met))
    for kind in sorted({request.kind for request in recording.requests}):
        of_kind = [request.kind == kind for request in recording.requests]
        found[f"in time, {kind}"] = _pair(np.mean(np.array(flags)[of_kind]) for flags in met)
    return found | {"stops": (float(recording.preemptions), float(preemptions))}


def _pair(figures: Iterable[Any]) -> tuple[float, float]:
    measured, ours = map(float, figures)
    return measured, ours
