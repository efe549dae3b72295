"""Steps and rules for tests of preemption."""

from msgspec.structs import replace

from slo.preemption.decide import decide
from slo.preemption.types import (
    Limits,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
    ReplicaState,
    RunningStep,
)


def step(*members, remaining_s=2.0, **about):
    members = tuple(replace(member, remaining_s=remaining_s) for member in members)
    return RunningStep(7, members, remaining_s, about.pop("restart_s", remaining_s), **about)


def rules(policy=PreemptionPolicy.RESCUE, mode=PreemptionMode.RESUME, **fields):
    return PreemptionRules(mode, policy, **{"limits": Limits.default_for(mode), "margin": 1.2, **fields})


def asked(running, *waiting, now_s=0.0, steps=0, held_bytes=0, forecast=None, targets=None, **about):
    state = ReplicaState(running, waiting, steps, held_bytes)
    return decide(state, now_s, rules(**about), forecast, targets)
