"""What a prefill replica tells its engine's scheduler and workers at start, and what these answer.

The setup travels as a plain dictionary in vLLM's `additional_config`, the place that vLLM keeps for such
things.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from slo.predict.pass_shape import PassShape
from slo.preemption.types import LAUNCH_AHEAD_S, Limits
from slo.queue.class_targets import ClassTargets
from slo.queue.fairness import STARVATION_TIMEOUT_S, Fairness
from slo.queue.order import DEFAULT_ORDER
from slo.tiers import DEFAULT_TIERS, Tier, TierPolicy, TierSet

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULER: Final = "prefill_node.engine.scheduler.SlackScheduler"
ASYNC_SCHEDULER: Final = "prefill_node.engine.scheduler.AsyncSlackScheduler"
_KEY: Final = "slackserve"


def shares_of(tiers: TierSet) -> dict[str, tuple[float, float]]:
    """Weight and share by the name of the tier, the most valuable first."""
    return {tier: (policy.weight, policy.share) for tier, policy in tiers.clients.items()}


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings of preemption inside the engine.

    Attributes:
        board: Path of the replica's board; empty for none, and then no step can be stopped.
        mode: A value of `slo.preemption.types.PreemptionMode`.
        order: A value of `slo.queue.order.QueueOrder`: which waiting prefill goes first.
        granularity: A value of `prefill_node.worker.boundary.BoundaryLevel`.
        compiled: Whether a pass that vLLM has compiled in pieces can stop between them.
        launch_ahead_s: Work that may be launched ahead of an accelerator, as predicted.
        stop_within_s: Steps are made so short that one can stop within this; infinite for any length.
        vote_timeout_s: A rank that stays away from a vote for longer has failed.
        join_tokens: Prompts share a step while they have no more tokens together.
        arrival_wait_s: How long a stopped step waits for a beneficiary that has not reached the engine.
        refused: Why no step can be stopped, where the configuration says so; empty for nothing.
        stock: Engine arguments with which an engine that is refused runs as vLLM does by itself.
        limits: How long and how much may be suspended; see `prefill_node.engine.stepping.step_choice`.
        shares: Weight and share of each tier by name, the most valuable first.
        starvation_timeout_s: See `slo.queue.fairness.FairnessRule`.
        targets: The target of each tier by name; empty when all requests are alike.
    """

    board: str = ""
    mode: str = "off"
    order: str = DEFAULT_ORDER.value
    granularity: str = "layer"
    compiled: bool = False
    launch_ahead_s: float = LAUNCH_AHEAD_S
    stop_within_s: float = math.inf
    vote_timeout_s: float = 20.0
    join_tokens: int = 2048
    arrival_wait_s: float = 0.05
    refused: str = ""
    stock: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    shares: dict[str, tuple[float, float]] = field(default_factory=lambda: shares_of(DEFAULT_TIERS))
    starvation_timeout_s: float = STARVATION_TIMEOUT_S
    targets: dict[Tier, float] = field(default_factory=dict)

    def fairness(self) -> Fairness:
        """What the queue owes to those that it would leave behind, with nothing served yet."""
        policies = {
            Tier(name): TierPolicy(None, None, sheddable=False, weight=weight, share=share)
            for name, (weight, share) in self.shares.items()
        }
        tiers = TierSet(policies, default=next(iter(policies)))
        return Fairness(tiers, self.starvation_timeout_s)

    def class_targets(self) -> ClassTargets | None:
        """What each class aims at, with nothing served yet; None when all requests are alike."""
        return ClassTargets(self.targets) if self.targets else None

    def encode(self) -> dict[str, Any]:
        """The `additional_config` engine argument."""
        return {_KEY: asdict(self)}

    @staticmethod
    def of(vllm_config: VllmConfig) -> EngineSetup:
        """What was encoded; preemption is off when nothing was."""
        return EngineSetup.of_arguments(vllm_config.additional_config)

    @staticmethod
    def of_arguments(additional_config: Mapping[str, Any] | None) -> EngineSetup:
        """The same from the engine argument."""
        return msgspec.convert((additional_config or {}).get(_KEY, {}), EngineSetup)


class PreemptionSupport(NamedTuple):
    """Where a worker's forward pass can stop. It may arrive as a plain list, its parts likewise.

    Attributes:
        done: See `PassShape`; this and the next two are what that is made of.
        granularity: A value of `prefill_node.worker.boundary.BoundaryLevel`; empty where it cannot stop.
        why_not: Why it cannot stop, or not at finer places; empty for nothing.
    """

    done: Sequence[Sequence[float]]
    pair_work: float
    late_by: int
    granularity: str
    why_not: str

    def shape(self) -> PassShape:
        """The boundaries of its pass."""
        return PassShape.told(self.done, self.pair_work, self.late_by)


@contextmanager
def hidden(vllm_config: VllmConfig) -> Iterator[None]:
    """The configuration without the setup, for as long as something is compiled by it.

    vLLM finds what it has stored of a compiled model by all of `additional_config`. The setup says nothing of
    what is computed, and its board has another path at every start.
    """
    given = vllm_config.additional_config
    vllm_config.additional_config = {name: value for name, value in given.items() if name != _KEY}
    try:
        yield
    finally:
        vllm_config.additional_config = given
