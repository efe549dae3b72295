"""The requests of one run: a workload's arrivals, as many as asked for, in the lengths that the model takes.

Pure. What a workload draws is `simulator.workload.arrivals`'s, what a prompt says is `load`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from deployments.bench import BenchError
from simulator.workload.arrivals import Arrival, Workload, assign_tiers
from slo.tiers import Tier

_MOST_REQUESTS: Final = 10_000_000
"""Of one run: all of them are drawn before the first is sent."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is done to a workload's requests.

    Attributes:
        scale: Factor on the lengths of prompts and outputs.
        max_tokens: Most tokens of a prompt and its output together; an output is cut to half of them, a
            prompt to what its output leaves.
        max_output_tokens: Most tokens of an output.
        tiers: Shares by which tiers are drawn, whatever the kinds' own; None leaves those.
    """

    scale: float = 1.0
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    tiers: Mapping[Tier, float] | None = None

    def fit(self, arrival: Arrival) -> Arrival:
        """The same request in these lengths. Shared blocks shrink with their prompts, and stay shared."""
        output = max(1, round(arrival.output_tokens * self.scale))
        tokens = max(1, round(arrival.tokens * self.scale))
        if self.max_output_tokens is not None:
            output = min(output, self.max_output_tokens)
        if self.max_tokens is not None:
            output = min(output, max(1, self.max_tokens // 2))
            tokens = min(tokens, self.max_tokens - output)
        block = max(1, round(arrival.block_tokens * self.scale))
        return replace(arrival, tokens=tokens, output_tokens=output, block_tokens=block)


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a run is: a number of requests, or, where that is None, the seconds in which they arrive.

    Attributes:
        rate_option: By which its rate is given, for those who have to give another one.
        fewest: With seconds, it goes on until so many have arrived.
    """

    requests: int | None = None
    duration_s: float = 60.0
    rate_option: str = "--rate"
    fewest: int = 0

    def check(self, rate_rps: float) -> None:
        """Make sure that a run at this rate has not too many requests.

        Raises:
            BenchError: when it has.
        """
        count = rate_rps * self.duration_s if self.requests is None else self.requests
        if count > _MOST_REQUESTS:
            raise BenchError(
                f"{count:.3g} requests are more than {_MOST_REQUESTS:,}; give a lower "
                "rate, or a shorter --duration or fewer --requests"
            )

    def of(self, workload: Workload, rate_rps: float, seed: int) -> list[Arrival]:
        """The workload's first arrivals.

        Raises:
            BenchError: when nothing arrives in that time, or too much.
        """
        self.check(rate_rps)
        if self.requests is not None:
            return workload.stream(rate_rps, self.requests, seed)
        count = max(ceil(rate_rps * self.duration_s) + 1, self.fewest)
        while (arrivals := workload.stream(rate_rps, count, seed))[-1].at_s < self.duration_s:
            count *= 2
        inside = [arrival for arrival in arrivals if arrival.at_s < self.duration_s]
        if len(inside) < self.fewest:
            return arrivals[: self.fewest]
        if not inside:
            raise BenchError(
                f"no request arrives within {self.duration_s:g} s at {rate_rps:g} requests/s; "
                f"give a longer --duration, a higher {self.rate_option} or another --seed"
            )
        return inside


def stream(workload: Workload, rate_rps: float, extent: Extent, shape: Shape, seed: int) -> list[Arrival]:
    """The requests of one run, in order of arrival; the same for the same arguments."""
    arrivals = extent.of(replace(workload, fit=shape.fit), rate_rps, seed)
    return arrivals if shape.tiers is None else list(assign_tiers(arrivals, shape.tiers, seed))
