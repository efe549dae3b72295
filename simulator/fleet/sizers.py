"""Who sizes a tier of replicas: our rules, and Ray Serve's own."""

from __future__ import annotations

import math
from collections import deque
from functools import partial

from simulator.fleet.scaling import DecodeTierSeen, PrefillTierSeen
from slo.autoscaling.need import Need, PrefillDemand, decode_need, prefill_need
from slo.autoscaling.scaler import Scaler, ScalingRules


class ByWork:
    """Ours of prefill: `slo.autoscaling`."""

    def __init__(self, rules: ScalingRules) -> None:
        self._scaler = Scaler(rules)

    def __call__(self, seen: PrefillTierSeen, now_s: float) -> int:
        """See `simulator.fleet.scaling.Elasticity.sizer`."""
        demand = PrefillDemand(seen.work, seen.backlog_s, seen.at_risk)
        need = partial(prefill_need, demand, seen.running, start_s=self._scaler.rules.start_s)
        return self._scaler.decide(need, seen.running, seen.target, now_s).target


class ByMemoryAndPace:
    """Ours of decode: `slo.autoscaling`."""

    def __init__(self, rules: ScalingRules) -> None:
        self._scaler = Scaler(rules)

    def __call__(self, seen: DecodeTierSeen, now_s: float) -> int:
        """See `simulator.fleet.scaling.Elasticity.sizer`."""

        def need(_: float) -> Need:
            return decode_need(seen.demand)

        return self._scaler.decide(need, seen.running, seen.target, now_s).target


class ByRequests:
    """Ray Serve's: requests at the replicas, averaged over a while, over how many each shall have.

    As `ray.serve.autoscaling_policy` of Ray 2.60: it follows what it wants once it has wanted more, or fewer,
    for long enough without a break.

    Args:
        target_ongoing: Requests that each replica shall have.
        upscale_delay_s: For so long it wants more before it grows.
        downscale_delay_s: And fewer before it shrinks.
        look_back_s: What it averages over.
    """

    def __init__(
        self,
        bounds: tuple[int, int],
        target_ongoing: float = 2.0,
        upscale_delay_s: float = 30.0,
        downscale_delay_s: float = 600.0,
        look_back_s: float = 30.0,
    ) -> None:
        self._bounds = bounds
        self._target_ongoing = target_ongoing
        self._delays_s = {1: upscale_delay_s, -1: downscale_delay_s}
        self._look_back_s = look_back_s
        self._seen: deque[tuple[float, int]] = deque()
        self._wants = 0
        self._since_s = 0.0

    def __call__(self, seen: PrefillTierSeen | DecodeTierSeen, now_s: float) -> int:
        """See `simulator.fleet.scaling.Elasticity.sizer`."""
        self._seen.append((now_s, seen.ongoing))
        while self._seen[0][0] < now_s - self._look_back_s:
            self._seen.popleft()
        ongoing = sum(count for _, count in self._seen) / len(self._seen)
        low, high = self._bounds
        wanted = min(max(math.ceil(ongoing / self._target_ongoing), low), high)
        wants = (wanted > seen.target) - (wanted < seen.target)
        if wants != self._wants:
            self._wants, self._since_s = wants, now_s
        if wants == 0 or now_s - self._since_s < self._delays_s[wants]:
            return seen.target
        self._wants = 0
        return wanted
