"""Arms that aim at a target of each class, and mixes whose kinds are those classes.

Owns what differs from the servers' defaults, which take all requests alike; `simulator.arms.arms` has those.
Other schedulers know no classes: to them the same stream is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from simulator.arms.arm import Arm
from simulator.arms.arms import OWN_CHUNKED, SERVERS, UNSTOPPED
from simulator.replica.hardware import Hardware
from simulator.workload.arrivals import Mix
from slo.queue.order import QueueOrder
from slo.tiers import Tier, TierPolicy, TierSet

_AIMING: Final = replace(SERVERS, aims=True)
BY_CLASS: Final[Mapping[str, Arm]] = {
    arm.name: arm
    for arm in (
        Arm("targets", "SlackServe, a target for each class", _AIMING.build),
        Arm(
            "targets-chunked",
            "… in chunks, no preemption",
            replace(UNSTOPPED, aims=True).build,
            OWN_CHUNKED,
        ),
        Arm("targets-unforeseen", "… no forecast", replace(_AIMING, foresees=False).build),
        Arm("targets-unfair", "… no fairness", replace(_AIMING, is_fair=False).build),
        Arm("targets-sedf", "… queue by S-EDF", replace(_AIMING, order=QueueOrder.SEDF).build),
        Arm("targets-alone", "… nobody joins", replace(_AIMING, join_tokens=1).build),
    )
}


def with_classes(hardware: Hardware, mix: Mix, target: float) -> tuple[Hardware, Mix]:
    """The same with each kind of the mix as a tier of its own, all of one weight and one target."""
    policies = {
        Tier(name): TierPolicy(kind.ttft_s, None, sheddable=True, weight=1.0, target=target)
        for name, kind in mix.kinds.items()
    }
    tiers = TierSet(policies, default=next(iter(policies)))
    kinds = {name: replace(kind, tier=Tier(name)) for name, kind in mix.kinds.items()}
    return replace(hardware, tiers=tiers), replace(mix, kinds=kinds)
