"""What is compared: ways to run one prefill replica, ours and others'.

Owns the settings of each arm. Those of the peers are as favourable as what is published about them allows:
nothing that they check costs them time, and what can be tuned for a rate is tuned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from prefill_node.engine.stepping.step_choice import ChoiceRules
from prefill_node.replica.governing.governor import ForwardProfile
from simulator.arms.aborting import AbortingReplica, AbortPolicy, AbortRules
from simulator.arms.admitting import AdmittingReplica
from simulator.arms.arm import Arm, Build
from simulator.arms.peers import PeerOrder, PeerReplica, PeerRules
from simulator.cost.passes import Granularity
from simulator.replica.engine import EngineLimits, VirtualEngine
from simulator.replica.hardware import Hardware, ReplicaModel
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.replica.replica import ReplicaRules, VirtualReplica
from slo.preemption.types import (
    CPU_STOP_WITHIN_S,
    LAUNCH_AHEAD_S,
    PATIENCE,
    STOP_WITHIN_S,
    Limits,
    PreemptionMode,
    PreemptionPolicy,
    PreemptionRules,
)
from slo.queue.arrival_forecast import Forecast
from slo.queue.batching import STEP_TOKENS
from slo.queue.class_targets import ClassTargets
from slo.queue.fairness import Fairness
from slo.queue.order import DEFAULT_ORDER, QueueOrder

CHUNKS: Final = (256, 512, 768, 1024, 2048, 8192)
"""Chunk sizes among which the best is taken for each rate."""
JOINS: Final = (1024, 2048, 8192)
"""Whole prompts share a step while they have no more tokens together; likewise the best is taken."""
WHOLE_TOKENS: Final = 32_768
"""The peers that do not chunk prefill prompts of so many tokens in one pass."""
JOIN_TOKENS: Final = 2048
"""The default of `preemption.join_tokens`."""
NO_LIMITS: Final = Limits(
    max_preemptions=1 << 30,
    max_suspended_s=float("inf"),
    max_suspended_steps=1 << 30,
    max_suspended_bytes=1 << 60,
)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The settings of a replica that runs our code.

    Attributes:
        stop_within_s: How long a stop may take on an accelerator, by which chunks are cut; on CPU it is
            `cpu_stop_within_s`.
        foresees: Whether it keeps time free for what will arrive.
        is_fair: Whether no class starves.
        aims: Whether each class has a target of its own, or all requests are alike.
    """

    preemption: PreemptionRules
    order: QueueOrder
    granularity: Granularity
    launch_ahead_s: float = 0.0
    stop_within_s: float = math.inf
    cpu_stop_within_s: float = math.inf
    join_tokens: int = JOIN_TOKENS
    step_tokens: int = WHOLE_TOKENS
    foresees: bool = False
    is_fair: bool = False
    aims: bool = False

    def build(
        self,
        loop: EventLoop,
        hardware: Hardware,
        setting: Mapping[str, float],
        prefilled: Callable[[Job], None],
    ) -> ReplicaModel:
        """Make a replica."""
        cost = hardware.at(self.granularity)
        predictor = replace(hardware, cost=cost).predictor()
        preemption = self.stops(setting, on_host=hardware.on_host)
        limits = EngineLimits(
            budget_tokens=int(setting.get("chunk_tokens", self.step_tokens)),
            kv_tokens=hardware.kv_tokens,
            suspension=preemption.limits,
            checkpoint_bytes_per_token=hardware.checkpoint_bytes_per_token,
        )
        forecast = Forecast() if self.foresees else None
        join_tokens = min(int(setting.get("join_tokens", self.join_tokens)), limits.budget_tokens)
        fairness = Fairness(hardware.tiers) if self.is_fair else None
        profile = self.profile(hardware)
        targets = ClassTargets(hardware.tiers.targets) if self.aims else None
        choice = ChoiceRules(self.order, predictor, join_tokens, forecast, fairness, profile.bound, targets)
        engine = VirtualEngine(cost, choice, limits)
        rules = ReplicaRules(preemption, self.order, predictor, hardware.weights)
        return VirtualReplica(loop, engine, rules, profile, prefilled)

    def stops(self, setting: Mapping[str, float], *, on_host: bool) -> PreemptionRules:
        """When it stops a pass; on a CPU nothing is put off."""
        rules = replace(self.preemption, patience=0.0) if on_host else self.preemption
        after = setting.get("stubborn_after", rules.limits.stubborn_after)
        return replace(rules, limits=replace(rules.limits, stubborn_after=after))

    def profile(self, hardware: Hardware) -> ForwardProfile:
        """What the replica knows of its passes; nothing bounds the steps of one that stops none."""
        is_bound = self.preemption.mode is not PreemptionMode.OFF
        within_s = self.cpu_stop_within_s if hardware.on_host else self.stop_within_s
        return ForwardProfile(
            hardware.at(self.granularity).shape_of_passes(),
            (),
            0.0 if hardware.on_host else self.launch_ahead_s,
            within_s if is_bound else math.inf,
        )


def _peer(order: PeerOrder, *, chunked: bool) -> Build:
    def build(
        loop: EventLoop, hardware: Hardware, setting: Mapping[str, float], prefilled: Callable[[Job], None]
    ) -> ReplicaModel:
        budget = int(setting["chunk_tokens" if chunked else "join_tokens"])
        rules = PeerRules(order, hardware.predictor(), budget, chunked, hardware.kv_tokens, hardware.tiers)
        return PeerReplica(loop, hardware.at(Granularity.NONE), rules, prefilled)

    return build


def _aborting(policy: AbortPolicy, **lifted: bool) -> Build:
    def build(
        loop: EventLoop, hardware: Hardware, _: Mapping[str, float], prefilled: Callable[[Job], None]
    ) -> ReplicaModel:
        rules = AbortRules(policy, hardware.predictor(), **lifted)
        return AbortingReplica(loop, hardware.at(Granularity.LAYER), rules, prefilled)

    return build


CHUNKED: Final = tuple({"chunk_tokens": float(chunk)} for chunk in CHUNKS)
OWN_CHUNKED: Final = (
    *CHUNKED,
    *({"chunk_tokens": tokens, "join_tokens": tokens} for tokens in (2304.0, 3072.0, 4096.0, 6144.0)),
)
"""Of our own arms, which fill a chunk with whole prompts only up to what may join.

The peers have nothing between 2,048 and 8,192 tokens.
"""
_JOINED: Final = tuple({"join_tokens": float(tokens)} for tokens in JOINS)
FLOWPREFILL: Final = PreemptionRules(
    PreemptionMode.RESUME, PreemptionPolicy.CONSERVATIVE, margin=1.0, limits=NO_LIMITS
)
ABORT: Final = PreemptionRules(
    PreemptionMode.RECOMPUTE, PreemptionPolicy.CONSERVATIVE, margin=1.0, limits=NO_LIMITS
)
_ABORTED: Final = tuple(
    {"join_tokens": join_tokens, "stubborn_after": after}
    for join_tokens, after in product(map(float, JOINS), (0.9, 0.75, 0.5, 0.25, 0.1))
)
"""After what part of a pass it is not aborted any more."""
OURS: Final = PreemptionRules(patience=PATIENCE)
"""The defaults of the servers; on a CPU nothing is put off."""
OFF: Final = PreemptionRules(PreemptionMode.OFF)

PAPER_ARMS: Final = (
    "fcfs",
    "fcfs-chunked",
    "sedf",
    "sedf-chunked",
    "sedf-recompute",
    "sedf-resume-layer",
    "sedf-resume",
    "slackserve-chunked",
    "slackserve",
)
ABORT_ARMS: Final = (
    "abort-control",
    "abort-conservative",
    "abort-aggressive",
    "abort-sees-arrivals",
    "abort-separates-victims",
    "abort-credits-progress",
    "abort-all-lifted",
    "sedf-chunked",
    "sedf-resume",
    "slackserve",
)
TIER_ARMS: Final = (
    "fcfs",
    "fcfs-chunked",
    "tier-order",
    "tier-chunked",
    "sedf-chunked",
    "sedf-resume",
    "slackserve-off",
    "slackserve-chunked",
    "slackserve",
    "slackserve-admission",
)
SERVERS: Final = Scheduling(
    OURS,
    DEFAULT_ORDER,
    Granularity.REPLAYED,
    LAUNCH_AHEAD_S,
    STOP_WITHIN_S,
    CPU_STOP_WITHIN_S,
    step_tokens=STEP_TOKENS,
    foresees=True,
    is_fair=True,
)
"""How the servers run a replica by default."""
_SLACKSERVE: Final = Arm("slackserve", "SlackServe", SERVERS.build)
UNSTOPPED: Final = replace(SERVERS, preemption=OFF, granularity=Granularity.NONE, launch_ahead_s=0.0)
ARMS: Final[Mapping[str, Arm]] = {
    arm.name: arm
    for arm in (
        Arm("tier-order", "By tier, no preemption", _peer(PeerOrder.TIER, chunked=False), _JOINED),
        Arm("tier-chunked", "By tier, chunked prefill", _peer(PeerOrder.TIER, chunked=True), CHUNKED),
        Arm("slackserve-off", "SlackServe, preemption off", UNSTOPPED.build),
        Arm("slackserve-chunked", "SlackServe in chunks, no preemption", UNSTOPPED.build, OWN_CHUNKED),
        Arm("abort-control", "Blog: no preemption", _aborting(AbortPolicy.CONTROL)),
        Arm("abort-conservative", "Blog: conservative", _aborting(AbortPolicy.CONSERVATIVE)),
        Arm("abort-aggressive", "Blog: aggressive", _aborting(AbortPolicy.AGGRESSIVE)),
        Arm(
            "abort-sees-arrivals",
            "… sees arrivals in a pass",
            _aborting(AbortPolicy.CONSERVATIVE, sees_arrivals=True),
        ),
        Arm(
            "abort-separates-victims",
            "… sees them, victims apart",
            _aborting(AbortPolicy.CONSERVATIVE, sees_arrivals=True, separates_victims=True),
        ),
        Arm(
            "abort-credits-progress",
            "… sees them, credits progress",
            _aborting(AbortPolicy.CONSERVATIVE, sees_arrivals=True, credits_progress=True),
        ),
        Arm(
            "abort-all-lifted",
            "… all three lifted",
            _aborting(
                AbortPolicy.CONSERVATIVE, sees_arrivals=True, separates_victims=True, credits_progress=True
            ),
        ),
        Arm("fcfs", "FCFS", _peer(PeerOrder.FCFS, chunked=False), _JOINED),
        Arm("fcfs-chunked", "FCFS, chunked prefill", _peer(PeerOrder.FCFS, chunked=True), CHUNKED),
        Arm(
            "sedf", "S-EDF, no preemption", Scheduling(OFF, QueueOrder.SEDF, Granularity.NONE).build, _JOINED
        ),
        Arm("sedf-chunked", "S-EDF, chunked prefill", _peer(PeerOrder.SEDF, chunked=True), CHUNKED),
        Arm(
            "sedf-recompute",
            "S-EDF, abort and recompute",
            Scheduling(ABORT, QueueOrder.SEDF, Granularity.LAYER).build,
            _ABORTED,
        ),
        Arm(
            "sedf-resume-layer",
            "S-EDF, suspend at layers",
            Scheduling(FLOWPREFILL, QueueOrder.SEDF, Granularity.LAYER).build,
            _JOINED,
        ),
        Arm(
            "sedf-resume",
            "S-EDF, suspend and resume",
            Scheduling(FLOWPREFILL, QueueOrder.SEDF, Granularity.OPERATOR).build,
            _JOINED,
        ),
        _SLACKSERVE,
        Arm("slackserve-admission", "SlackServe, with admission", partial(AdmittingReplica, arm=_SLACKSERVE)),
    )
}
