"""Whether decode replicas bear a load for as long as it lasts, by arithmetic.

Owns the steady state of a replica that reserves memory for whole answers. A simulated stream that is shorter
than its answers never gets there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean

from simulator.fleet.setup import FleetSetup
from simulator.workload.arrivals import Arrival


def bears(
    setup: FleetSetup, arrivals: Sequence[Arrival], rate_rps: float, replicas: int, target: float
) -> bool:
    """Whether, with so many replicas, a fraction `target` finds memory at once and steps keep TPOT.

    Requests come at random times and stay for their answer's length times the mean step (M/G/∞), so that sums
    over those in progress have the means and variances of a compound Poisson distribution. They are taken to
    be normal, and the router to spread them evenly. That is optimistic, most of all where a replica holds few
    requests: whoever waits stays longer, and bursts are left out. What is too long for the memory is refused,
    and what prefill has answered does not come.
    """
    come = [each for each in arrivals if each.output_tokens > 1 and _reserved(each) < setup.decode.kv_tokens]
    rate_rps *= len(come) / len(arrivals) / replicas
    return not come or _bears(setup, come, rate_rps, replicas, target)


def _bears(
    setup: FleetSetup, arrivals: Sequence[Arrival], rate_rps: float, replicas: int, target: float
) -> bool:
    step_s = _mean_step_s(setup, arrivals, rate_rps)
    if step_s is None:
        return False
    model = setup.decode

    def most(part: Callable[[Arrival], float]) -> float:
        """What the sum over those in progress on a replica is at most in so many cases."""
        mean = rate_rps * step_s * fmean(_tokens(each) * part(each) for each in arrivals)
        variance = rate_rps * step_s * fmean(_tokens(each) * part(each) ** 2 for each in arrivals) / replicas
        return mean + NormalDist().inv_cdf(target) * math.sqrt(variance)

    newcomer = fmean(_reserved(each) for each in arrivals)
    if most(_reserved) + newcomer > model.kv_tokens or most(lambda _: 1.0) + 1 > model.max_batch:
        return False
    objectives_s = [
        tpot_s
        for tier in {arrival.tier for arrival in arrivals}
        if (tpot_s := setup.tiers[tier].tpot_s) is not None
    ]
    reading_s = most(lambda arrival: model.kv_token_s * _context(arrival))
    computing_s = most(lambda arrival: _added_s(setup, arrival))
    longest_s = model.fixed_s + max(model.weights_s + reading_s, computing_s)
    return longest_s <= min(objectives_s, default=math.inf)


def _mean_step_s(setup: FleetSetup, arrivals: Sequence[Arrival], rate_rps: float) -> float | None:
    """The step at which as many requests end as come; None when no step is long enough."""
    model = setup.decode
    reading = rate_rps * fmean(_tokens(each) * model.kv_token_s * _context(each) for each in arrivals)
    computing = rate_rps * fmean(_tokens(each) * _added_s(setup, each) for each in arrivals)
    if max(reading, computing) >= 1:
        return None
    return max((model.fixed_s + model.weights_s) / (1 - reading), model.fixed_s / (1 - computing))


def _tokens(arrival: Arrival) -> int:
    """Those that decode computes; prefill has sampled the first."""
    return arrival.output_tokens - 1


def _reserved(arrival: Arrival) -> int:
    return arrival.tokens + _tokens(arrival)


def _context(arrival: Arrival) -> float:
    """On average over its answer."""
    return arrival.tokens + _tokens(arrival) / 2


def _added_s(setup: FleetSetup, arrival: Arrival) -> float:
    """What it adds to a step that is long enough to read the weights in."""
    return setup.decode.request_s + setup.decode.kv_token_s * _context(arrival)
