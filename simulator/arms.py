"""What is compared: ways to run one prefill replica, ours and others'.

Owns the settings of each arm. Those of the peers are as favourable as what is published about them allows:
nothing that they check costs them time, and what can be tuned for a rate is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from prefill_node.lost_steps import SuspensionRoom
from prefill_node.operator_work import REFERENCE_TOKENS
from prefill_node.step_choice import ChoiceRules
from simulator.aborting import AbortingReplica, AbortPolicy, AbortRules
from simulator.admitting import AdmittingReplica
from simulator.cost import CostModel, Granularity
from simulator.engine import EngineLimits, VirtualEngine
from simulator.peers import PeerOrder, PeerReplica, PeerRules
from simulator.replica import ReplicaRules, VirtualReplica
from slo.batching import STEP_TOKENS
from slo.fairness import Fairness
from slo.forecast import Forecast
from slo.order import DEFAULT_ORDER, QueueOrder
from slo.predictor import Sample, fit
from slo.preemption import Limits, PreemptionMode, PreemptionPolicy, PreemptionRules
from slo.tiers import DEFAULT_TIER_POLICIES, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from simulator.job import Job
    from simulator.loop import EventLoop
    from slo.predictor import PrefillPredictor
    from slo.tiers import TierPolicy

CHUNKS: Final = (512, 1024, 2048, 8192)
"""Chunk sizes among which the best is taken for each rate."""
JOINS: Final = (1024, 8192)
"""Whole prompts share a step while they have no more tokens together; likewise the best is taken."""
WHOLE_TOKENS: Final = 32_768
"""The peers that do not chunk prefill prompts of so many tokens in one pass."""
JOIN_TOKENS: Final = 2048
"""The default of `preemption.join_tokens`."""
_CALIBRATION: Final = (
    *((tokens, 0) for tokens in (32, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)),
    *((tokens, context) for tokens in (128, 2048) for context in (2048, 16_384)),
)
"""Lengths and contexts that are measured, tokens."""
NO_LIMITS: Final = Limits(
    max_preemptions=1 << 30,
    max_suspended_s=float("inf"),
    max_suspended_steps=1 << 30,
    max_suspended_bytes=1 << 60,
)
TIER_WEIGHTS: Final[Mapping[Tier, float]] = {
    tier: policy.weight for tier, policy in DEFAULT_TIER_POLICIES.items()
}


class Replica(Protocol):
    """One prefill replica, whoever's."""

    @property
    def blocking_s(self) -> list[float]:
        """Of each stop, from the decision to standstill."""
        ...

    @property
    def busy_s(self) -> float:
        """Device time spent so far."""
        ...

    def arrive(self, job: Job) -> None:
        """Take a request."""
        ...

    def release(self, job: Job) -> None:
        """The KV of a prefilled request has left."""
        ...


@dataclass(frozen=True, slots=True)
class Hardware:
    """The replica that all arms run on.

    Attributes:
        cost: Times of its passes; each arm has its own granularity.
        kv_tokens: Tokens that its KV memory holds.
        weights: Worth of a request on time, by tier.
        checkpoint_bytes_per_token: What a checkpoint keeps, hidden states and residual.
    """

    cost: CostModel
    kv_tokens: int = 400_000
    weights: Mapping[Tier, float] = field(default_factory=lambda: TIER_WEIGHTS)

    def policies(self) -> dict[Tier, TierPolicy]:
        """The default policies with these weights."""
        return {
            tier: replace(policy, weight=self.weights.get(tier, policy.weight))
            for tier, policy in DEFAULT_TIER_POLICIES.items()
        }

    @property
    def checkpoint_bytes_per_token(self) -> int:
        """Hidden states and residual in 16 bits."""
        return 2 * 2 * self.cost.shape.hidden

    def at(self, granularity: Granularity) -> CostModel:
        """The costs with boundaries elsewhere."""
        return replace(self.cost, granularity=granularity, _by_tokens={})

    def predictor(self) -> PrefillPredictor:
        """What `slackserve calibrate` would find."""
        measure = self.cost.prefill_s
        return fit([Sample(new, measure(new, behind), behind) for new, behind in _CALIBRATION]).predictor


Build: TypeAlias = "Callable[[EventLoop, Hardware, Mapping[str, float], Callable[[Job], None]], Replica]"
"""Makes a replica in a loop, on hardware, with a setting; the last is called with each prefilled request."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run a replica.

    Attributes:
        build: Makes a replica, given what was chosen from `settings`.
        settings: What is tuned for each rate; one empty setting for nothing.
    """

    name: str
    title: str
    build: Build
    settings: Sequence[Mapping[str, float]] = ({},)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The settings of a replica that runs our code."""

    preemption: PreemptionRules
    order: QueueOrder
    granularity: Granularity
    launch_ahead: int = 0
    join_tokens: int = JOIN_TOKENS
    step_tokens: int = WHOLE_TOKENS
    foresees: bool = False
    is_fair: bool = False

    def build(
        self,
        loop: EventLoop,
        hardware: Hardware,
        setting: Mapping[str, float],
        prefilled: Callable[[Job], None],
    ) -> Replica:
        """Make a replica."""
        cost, predictor = hardware.at(self.granularity), hardware.predictor()
        held = self.preemption.limits
        limits = EngineLimits(
            budget_tokens=self.step_tokens,
            kv_tokens=hardware.kv_tokens,
            max_suspended_s=held.max_suspended_s,
            suspended=SuspensionRoom(held.max_suspended_steps, held.max_suspended_bytes),
            checkpoint_bytes_per_token=hardware.checkpoint_bytes_per_token,
        )
        forecast = Forecast() if self.foresees else None
        join_tokens = int(setting.get("join_tokens", self.join_tokens))
        fairness = Fairness(hardware.policies()) if self.is_fair else None
        choice = ChoiceRules(self.order, predictor, join_tokens, forecast, fairness)
        engine = VirtualEngine(cost, choice, limits)
        rules = ReplicaRules(self.preemption, self.order, predictor, hardware.weights, self.launch_ahead)
        return VirtualReplica(loop, engine, rules, cost.times([(REFERENCE_TOKENS, 0)]).shape, prefilled)


def _peer(order: PeerOrder, *, chunked: bool) -> Build:
    def build(
        loop: EventLoop, hardware: Hardware, setting: Mapping[str, float], prefilled: Callable[[Job], None]
    ) -> Replica:
        budget = int(setting["chunk_tokens" if chunked else "join_tokens"])
        rules = PeerRules(order, hardware.predictor(), budget, chunked, hardware.kv_tokens)
        return PeerReplica(loop, hardware.at(Granularity.NONE), rules, prefilled)

    return build


def _aborting(policy: AbortPolicy, **lifted: bool) -> Build:
    def build(
        loop: EventLoop, hardware: Hardware, _: Mapping[str, float], prefilled: Callable[[Job], None]
    ) -> Replica:
        rules = AbortRules(policy, hardware.predictor(), **lifted)
        return AbortingReplica(loop, hardware.at(Granularity.LAYER), rules, prefilled)

    return build


def _admitting(arm: Arm) -> Build:
    def build(
        loop: EventLoop, hardware: Hardware, setting: Mapping[str, float], prefilled: Callable[[Job], None]
    ) -> Replica:
        return AdmittingReplica(loop, arm, hardware, setting, prefilled)

    return build


_CHUNKED: Final = tuple({"chunk_tokens": float(chunk)} for chunk in CHUNKS)
_JOINED: Final = tuple({"join_tokens": float(tokens)} for tokens in JOINS)
FLOWPREFILL: Final = PreemptionRules(
    PreemptionMode.RESUME, PreemptionPolicy.CONSERVATIVE, margin=1.0, limits=NO_LIMITS
)
ABORT: Final = PreemptionRules(
    PreemptionMode.RECOMPUTE,
    PreemptionPolicy.CONSERVATIVE,
    margin=1.0,
    limits=replace(NO_LIMITS, stubborn_after=0.9),
)
OURS: Final = PreemptionRules()
"""The defaults of the servers."""
OFF: Final = PreemptionRules(PreemptionMode.OFF)

PAPER_ARMS: Final = (
    "fcfs",
    "fcfs-chunked",
    "sedf",
    "sedf-chunked",
    "sedf-recompute",
    "sedf-resume-layer",
    "sedf-resume",
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
    "slackserve",
)
TIER_ARMS: Final = ("fcfs", "tier-order", "slackserve-off", "slackserve", "slackserve-admission")
SERVERS: Final = Scheduling(
    OURS,
    DEFAULT_ORDER,
    Granularity.REPLAYED,
    1,
    step_tokens=STEP_TOKENS,
    foresees=True,
    is_fair=True,
)
"""How the servers run a replica by default."""
_SLACKSERVE: Final = Arm("slackserve", "SlackServe", SERVERS.build)
ARMS: Final[Mapping[str, Arm]] = {
    arm.name: arm
    for arm in (
        Arm("tier-order", "By tier, no preemption", _peer(PeerOrder.TIER, chunked=False), _JOINED),
        Arm(
            "slackserve-off",
            "SlackServe, preemption off",
            replace(SERVERS, preemption=OFF, granularity=Granularity.NONE, launch_ahead=0).build,
        ),
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
        Arm("fcfs-chunked", "FCFS, chunked prefill", _peer(PeerOrder.FCFS, chunked=True), _CHUNKED),
        Arm(
            "sedf", "S-EDF, no preemption", Scheduling(OFF, QueueOrder.SEDF, Granularity.NONE).build, _JOINED
        ),
        Arm("sedf-chunked", "S-EDF, chunked prefill", _peer(PeerOrder.SEDF, chunked=True), _CHUNKED),
        Arm(
            "sedf-recompute",
            "S-EDF, abort and recompute",
            Scheduling(ABORT, QueueOrder.SEDF, Granularity.LAYER).build,
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
        Arm("slackserve-admission", "SlackServe, with admission", _admitting(_SLACKSERVE)),
    )
}
