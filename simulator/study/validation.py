"""The simulator against a recording of a real server.

Owns the form of a recording and the comparison. What a prompt takes alone, from its sending to its first
token, is taken from the recording; what several do to each other is what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec
import numpy as np

from simulator.arms.arms import ARMS
from simulator.cost.accelerators import MODELS
from simulator.cost.operators import OPERATORS, Line, Measured
from simulator.cost.passes import Accelerator, CostModel
from simulator.replica.hardware import Hardware
from simulator.study.run import run
from simulator.workload.arrivals import Arrival
from slo.tiers import Tier

EMBEDDED = MODELS["smollm2-135m"]


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
    """

    arm: str
    prefill: list[tuple[int, float]]
    alone: list[tuple[int, float]]
    requests: list[Recorded]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @staticmethod
    def of(document: Mapping[str, Any]) -> Recording:
        """From what `document` gave."""
        return msgspec.convert({field.name: document[field.name] for field in fields(Recording)}, Recording)


def hardware(recording: Recording) -> Hardware:
    """A replica with the prefill times that were measured; attention and host time are in them."""
    points = recording.prefill
    half = Measured([(tokens, seconds / 2 / EMBEDDED.layers) for tokens, seconds in points])
    nothing = {name: Line(0.0, 0.0, 0.0) for name in OPERATORS}
    operators = nothing | {"attn_pre_proj": half, "mlp_up_proj": half}
    free = Accelerator(peak_flops=float("inf"), link_bytes_ps=float("inf"), link_latency_s=0.0)
    return Hardware(CostModel(EMBEDDED, operators, free, step_s=0.0), on_host=True)


def simulated_s(recording: Recording) -> list[float]:
    """The times to first token that the simulator foretells, in the order of the recording."""
    replica = hardware(recording)
    handoff = Measured([(t, s - replica.cost.prefill_s(t)) for t, s in recording.alone])
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
    served = run(ARMS[recording.arm], replica, arrivals)
    return [job.ttft_s + handoff(job.num_tokens) for job in served.jobs]


def compare(recording: Recording) -> dict[str, tuple[float, float]]:
    """Measured and simulated quantiles of the time to first token, seconds: "p50" and "p95"."""
    measured = [request.ttft_s for request in recording.requests]
    simulated = simulated_s(recording)
    return {
        f"p{p}": (float(np.percentile(measured, p)), float(np.percentile(simulated, p))) for p in (50, 95)
    }
