"""What a simulated fleet is made of, and what happens to it."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from router.fleet.view import RouterLimits
from simulator.arms.arm import Arm
from simulator.cost.decode_steps import INSTANT_DECODE, DecodeModel
from simulator.fleet.decode import SimulatedDecode, VirtualDecodeReplica
from simulator.fleet.pressed_decode import PressedDecodeReplica
from simulator.pressure.engine import PressedSetup
from simulator.pressure.ours import Ours
from simulator.pressure.ways import FirstCome
from simulator.replica.hardware import Hardware
from simulator.replica.loop import EventLoop
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates
from slo.predict.handoff import Link, TransferFit
from slo.tiers import DEFAULT_TIERS, TierSet

HANDOFF_S: Final = 0.002
"""A first token's way when nobody says how long it is: that of a request."""
_BLOCK: Final = 16
_CHUNK: Final = 512
"""Tokens of a block, and of a sequence that one step computes again at most."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A prefill replica dies and another takes its place, empty.

    Attributes:
        replica: Which, from 0.
        at_s: When it dies.
        back_s: When the other is ready.

    Raises:
        ValueError: if it is ready before that.
    """

    replica: int
    at_s: float
    back_s: float

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        if not self.at_s < self.back_s:
            raise ValueError(
                f"a replica that dies at {self.at_s:g} s is back after that, not at {self.back_s:g} s"
            )


class DecodeMemory(enum.StrEnum):
    """How a decode replica gives out its KV memory."""

    RESERVED = "reserved"
    """For prompt and answer when a request is admitted, as if the answer's length were known."""
    VLLM = "vllm"
    """In blocks as answers grow; who came last loses its memory when there are none left."""
    PRESSURE = "pressure"
    """In blocks, with the rules of `pressure.enabled`."""


@dataclass(frozen=True, slots=True)
class Delays:
    """What passes between the parts.

    Attributes:
        report_s: A report's way to the router, and the answer's way back.
        wire_s: A request's way to its prefill replica; nobody subtracts it from the budget.
        render_s: Rendering and tokenising, which is subtracted.
        detect_s: From a replica's death until its requests are placed again.
    """

    report_s: float = 0.001
    wire_s: float = 0.002
    render_s: float = 0.002
    detect_s: float = 5.0


NO_DELAYS: Final = Delays(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """What a fleet is made of.

    Attributes:
        setting: One of the arm's settings; None takes its first.
        link: Into each decode replica.
        tiers: Of each tier, whether it may be shed, and its TPOT objective; weights are the hardware's.
        placement: A key of `router.placement.registry.POLICIES`; None takes `least_harm` for replicas that
            report what they have to do, and `least_outstanding_tokens` for others.
        limits: How the router treats reports.
        handoff_s: From the end of a prefill to its first token at the client, which the router knows.
        decode_memory: How decode replicas give out theirs.
        admission: Rules by which the router refuses requests before it places them; None refuses nobody.
        seed: For refusals with a probability, and for placement policies that draw lots.
    """

    arm: Arm
    hardware: Hardware
    prefill_replicas: int
    decode_replicas: int = 1
    decode: DecodeModel = INSTANT_DECODE
    link: Link = field(default_factory=Link)
    setting: Mapping[str, float] | None = None
    tiers: TierSet = DEFAULT_TIERS
    placement: str | None = None
    limits: RouterLimits = field(default_factory=RouterLimits)
    delays: Delays = field(default_factory=Delays)
    handoff_s: float = HANDOFF_S
    decode_memory: DecodeMemory = DecodeMemory.RESERVED
    admission: AdmissionRules | None = None
    seed: int = 0

    def taking_all(self) -> FleetSetup:
        """The same fleet with a router that refuses nobody."""
        tiers = {name: replace(each, sheddable=False) for name, each in self.tiers.clients.items()}
        return replace(self, tiers=self.tiers.revised(tiers), admission=None)

    def kv_link(self) -> TransferFit:
        """What the router is told of the link."""
        size = self.hardware.cost.shape.kv_bytes_per_token
        return TransferFit(self.link.latency_s, size / self.link.bytes_ps)

    def decode_replica(self, loop: EventLoop) -> SimulatedDecode:
        """A decode replica."""
        if self.decode_memory is DecodeMemory.RESERVED:
            return VirtualDecodeReplica(loop, self.decode)
        prompt_token_s = self.hardware.cost.prefill_s(_CHUNK) / _CHUNK
        blocks = self.decode.kv_tokens // _BLOCK
        engine = PressedSetup(
            self.decode, prompt_token_s, blocks, _BLOCK, _CHUNK, max_seqs=self.decode.max_batch
        )
        tiers = self.weighted_tiers()
        is_ours = self.decode_memory is DecodeMemory.PRESSURE
        return PressedDecodeReplica(loop, engine, Ours(tiers) if is_ours else FirstCome(), tiers)

    def controller(self) -> AdmissionController | None:
        """Admission with nothing admitted yet."""
        if self.admission is None:
            return None
        draw = random.Random(self.seed).random  # noqa: S311 - reproducible, not secret
        return AdmissionController(self.weighted_tiers(), self.admission, TenantGates(), draw)

    def weighted_tiers(self) -> TierSet:
        """The tiers with the weights that the replicas reckon with."""
        weights = self.hardware.weights
        return self.tiers.revised(
            {tier: replace(policy, weight=weights[tier]) for tier, policy in self.tiers.clients.items()}
        )
