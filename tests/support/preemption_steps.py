"""Steps, waiters and rules for tests of preemption."""

import math

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
from slo.queue.prefill import Prefill
from slo.request import JobId

NEVER = math.inf


def job(name, due_s=NEVER, work_s=1.0, weight=1.0, **history):
    return Prefill(JobId(name), weight, due_s, work_s, 0.0, **history)


def step(*members, remaining_s=2.0, **about):
    members = tuple(replace(member, remaining_s=remaining_s) for member in members)
    return RunningStep(7, members, remaining_s, about.pop("restart_s", remaining_s), **about)


def rules(policy=PreemptionPolicy.RESCUE, mode=PreemptionMode.RESUME, **fields):
    return PreemptionRules(mode, policy, **{"limits": Limits.default_for(mode), "margin": 1.2, **fields})


def asked(running, *waiting, now_s=0.0, steps=0, held_bytes=0, **about):
    return decide(ReplicaState(running, waiting, steps, held_bytes), now_s, rules(**about))
