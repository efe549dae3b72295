"""A user's own fleet, as a YAML file, and what it stands for in the simulation.

Owns the names, units and defaults of the file. What a model takes on an accelerator is
`simulator.cost.accelerators`'s.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from router.fleet.view import SILENT_AFTER_S, RouterLimits
from router.placement.registry import PlacementName
from simulator.arms.arms import ARMS
from simulator.cost.accelerators import (
    CHIPS,
    MODELS,
    Chip,
    calibrated_cost_model,
    cost_model,
    decode_model,
    kv_tokens,
)
from simulator.cost.decode_steps import DecodeModel
from simulator.cost.operators import ModelShape
from simulator.cost.passes import CostModel
from simulator.fleet.setup import HANDOFF_S, DecodeMemory, Delays, FleetSetup
from simulator.planning.plan import Outage, PlannedLoad
from simulator.replica.hardware import Hardware
from simulator.workload.arrivals import TraceError
from simulator.workload.files import PathBesideFile, Tokens, WorkloadConfig
from slo.admission.rules import AdmissionRules
from slo.files.profile import Profile, read_profile
from slo.files.strict_yaml import (
    FleetConfigError,
    Positive,
    Section,
    TierName,
    explain,
    known_name,
    read_mapping,
)
from slo.files.tiers import TierSection, tier_set
from slo.predict.handoff import Link
from slo.tiers import Tier

_FEWEST_REQUESTS = 2000
_SPAN_S = 60.0
_ADMITTING = frozenset({"slackserve", "slackserve-off", "slackserve-chunked"})
"""Arms behind whose routers requests are refused by the servers' default rules."""
_REFUSES_ITSELF = "slackserve-admission"
"""It tells no router whom it has refused, which would wait for their ends for ever."""
_PLACED_AGAIN_AFTER_S: Final = 2.5
"""What a replica had that is lost with its host is placed again so long after, as `docs/failures.md` says."""


Ranks = Annotated[int, Field(ge=1, le=64)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class ShapeConfig(Section):
    """A model that is not known by name."""

    layers: Annotated[int, Field(ge=1, le=1000)]
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Annotated[int, Field(ge=1, le=4096)] = 128

    def shape(self) -> ModelShape:
        """The same for the cost model."""
        return ModelShape(**self.model_dump())


class ChipConfig(Section):
    """An accelerator that is not known by name."""

    peak_tflops: Positive = Field(description="Dense, 16-bit.")
    memory_gb_ps: Positive = Field(description="Memory bandwidth, GB per second.")
    memory_gb: Positive
    link_gb_ps: Positive = Field(64.0, description="All-reduce between ranks, GB per second.")

    def chip(self) -> Chip:
        """The same in bytes and FLOPs."""
        memory_bytes_ps, memory_bytes = self.memory_gb_ps * 1e9, self.memory_gb * 1e9
        return Chip("own", self.peak_tflops * 1e12, memory_bytes_ps, memory_bytes, self.link_gb_ps * 1e9)


ChipOrName = Annotated[
    str | ChipConfig, BeforeValidator(lambda value: known_name("accelerator", value, CHIPS))
]


class LinkConfig(Section):
    """What KV cache moves over from prefill to decode, into each decode replica."""

    gb_ps: Positive = Field(25.0, description="GB per second.")
    latency_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0

    def link(self) -> Link:
        """The same in bytes and seconds."""
        return Link(self.gb_ps * 1e9, self.latency_ms / 1e3)


class DecodePoolConfig(Section):
    """Decode replicas; what is not given is as for prefill."""

    accelerator: ChipOrName | None = None
    tensor_parallel: Ranks | None = None
    kv_tokens: Tokens | None = Field(None, description="By default what is left beside the weights.")
    max_batch: Count = 256
    memory: DecodeMemory = Field(
        DecodeMemory.RESERVED,
        description="Given out for prompt and answer at once (`reserved`), or in blocks as answers grow: as "
        "vLLM does (`vllm`), or by the rules of `pressure.enabled` (`pressure`).",
    )


class OutageConfig(Section):
    """Prefill replicas that are lost while the load is served."""

    replicas: Count = Field(1, description="How many die at once; others take their places, empty.")
    at_s: Positive = Field(20.0, description="When, seconds from the beginning of the load.")
    for_s: Positive = Field(
        description="Seconds until their places are taken: what a new replica, or a new node, takes to come."
    )

    def outage(self) -> Outage:
        """The same for a plan."""
        return Outage(self.replicas, self.at_s, self.for_s)


class FleetConfig(Section):
    """A fleet and its load."""

    model: Annotated[str | ShapeConfig, BeforeValidator(lambda value: known_name("model", value, MODELS))] = (
        "llama-3-8b"
    )
    accelerator: ChipOrName = "a100"
    tensor_parallel: Ranks = 1
    profile: PathBesideFile | None = Field(
        None, description="Prefill times from `slackserve calibrate`, instead of what the accelerator offers."
    )
    kv_tokens: Tokens | None = Field(
        None, description="Of a prefill replica; by default what is left beside the weights."
    )
    arm: Annotated[str, BeforeValidator(lambda value: known_name("arm", value, ARMS))] = Field(
        "slackserve", description="How prefill replicas are run."
    )
    placement: PlacementName | None = None
    link: LinkConfig = LinkConfig()
    decode: DecodePoolConfig = DecodePoolConfig()
    handoff_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        HANDOFF_S * 1e3, description="From the end of a prefill to its first token at the client."
    )
    tiers: dict[TierName, TierSection] = Field(
        default_factory=dict, description="As in a deployment; the workload gives objectives of first tokens."
    )
    workload: WorkloadConfig
    rate_rps: Positive = Field(description="Requests per second.")
    target: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95, description="Fraction of each tier's requests whose objectives are to be met."
    )
    requests: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None, description="To simulate; by default those of a minute, and at least 2,000."
    )
    outage: OutageConfig | None = Field(
        None, description="What the fleet is to bear; by default nothing is lost."
    )
    seed: int = 1

    @field_validator("arm")
    @classmethod
    def _possible_arm(cls, name: str) -> str:
        if name == _REFUSES_ITSELF:
            raise ValueError(
                f"{name} is one replica that refuses requests; in a fleet the router does, with slackserve"
            )
        return name

    @field_validator("tiers")
    @classmethod
    def _possible_tiers(cls, given: dict[Tier, TierSection]) -> dict[Tier, TierSection]:
        tier_set(given)
        return given

    @model_validator(mode="after")
    def _known_tiers(self) -> Self:
        for tier in self.workload.tiers():
            known_name("tier", tier, tier_set(self.tiers).names)
        return self

    @model_validator(mode="after")
    def _possible_degrees(self) -> Self:
        """As vLLM divides them: equal parts of the heads, and KV heads either divided or copied."""
        shape = self._shape()
        degrees = {"": self.tensor_parallel, "decode.": self.decode.tensor_parallel or self.tensor_parallel}
        for where, degree in degrees.items():
            if shape.heads % degree or (shape.kv_heads % degree and degree % shape.kv_heads):
                raise ValueError(
                    f"{where}tensor_parallel: {degree} does not divide the model's {shape.heads} heads into "
                    f"equal parts with KV heads of their own, of which it has {shape.kv_heads}"
                )
        return self

    def setup(self, prefill_replicas: int = 1, decode_replicas: int = 1) -> FleetSetup:
        """The fleet with so many replicas."""
        tiers = tier_set(self.tiers)
        shape, chip = self._shape(), _chip(self.accelerator)
        kv = self.kv_tokens or _room_for_kv("the prefill replicas", shape, chip, self.tensor_parallel)
        return FleetSetup(
            arm=ARMS[self.arm],
            hardware=Hardware(self._cost(), kv, tiers, on_host=self._is_on_host()),
            prefill_replicas=prefill_replicas,
            decode_replicas=decode_replicas,
            decode=self._decode(),
            decode_memory=self.decode.memory,
            link=self._link(),
            tiers=tiers,
            placement=self.placement,
            limits=RouterLimits(silent_after_s=SILENT_AFTER_S),
            delays=Delays(detect_s=_PLACED_AGAIN_AFTER_S),
            handoff_s=self._handoff_s(),
            admission=AdmissionRules() if self.arm in _ADMITTING else None,
            seed=self.seed,
        )

    def demand(self) -> PlannedLoad:
        """The load."""
        requests = self.requests or max(_FEWEST_REQUESTS, math.ceil(self.rate_rps * _SPAN_S))
        outage = None if self.outage is None else self.outage.outage()
        if outage is not None and outage.at_s >= (span_s := requests / self.rate_rps):
            raise FleetConfigError(
                f"outage.at_s: {outage.at_s:g} s is behind the load's end; {requests} requests at "
                f"{self.rate_rps:g}/s last {span_s:.0f} s, give less or raise requests"
            )
        try:
            workload = self.workload.workload(self._cost().prefill_s, tier_set(self.tiers).default)
        except TraceError as error:
            raise FleetConfigError(f"workload.trace: {error}") from None
        return PlannedLoad(workload, self.rate_rps, requests, self.seed, self.target, outage)

    def _shape(self) -> ModelShape:
        return MODELS[self.model] if isinstance(self.model, str) else self.model.shape()

    @cached_property
    def _measured(self) -> Profile | None:
        return None if self.profile is None else read_profile(self.profile, FleetConfigError)

    def _cost(self) -> CostModel:
        if (measured := self._measured) is not None:
            return calibrated_cost_model(self._shape(), measured.predictor)
        return cost_model(self._shape(), _chip(self.accelerator), self.tensor_parallel)

    def _is_on_host(self) -> bool:
        """Whether the profile is of a CPU."""
        return self._measured is not None and self._measured.subject.accelerator == "cpu"

    def _handoff_s(self) -> float:
        """What the file says; else what a profile has measured; else the default."""
        measured_s = 0.0
        if self._measured is not None and "handoff_ms" not in self.model_fields_set:
            measured_s = self._measured.predictor.handoff_s
        return measured_s or self.handoff_ms / 1e3

    def _link(self) -> Link:
        """What the file says; else what a profile has measured; else the default."""
        measured = None
        if self._measured is not None and "link" not in self.model_fields_set:
            measured = self._measured.link(self._shape().kv_bytes_per_token)
        return measured or self.link.link()

    def _decode(self) -> DecodeModel:
        pool = self.decode
        chip = _chip(pool.accelerator or self.accelerator)
        ranks = pool.tensor_parallel or self.tensor_parallel
        kv = pool.kv_tokens or _room_for_kv("the decode replicas", self._shape(), chip, ranks)
        return decode_model(self._shape(), chip, ranks, kv, pool.max_batch)


def _chip(value: str | ChipConfig) -> Chip:
    return CHIPS[value] if isinstance(value, str) else value.chip()


def _room_for_kv(whose: str, shape: ModelShape, chip: Chip, ranks: int) -> int:
    """Tokens whose KV fits beside the weights."""
    tokens = kv_tokens(shape, chip, ranks)
    if tokens <= 0:
        memory_gb = ranks * chip.memory_bytes / 1e9
        raise FleetConfigError(
            f"the model does not fit into the {memory_gb:.0f} GB of {whose}; raise tensor_parallel, "
            "or give kv_tokens if it is quantised"
        )
    return tokens


def parse_fleet(
    values: Mapping[str, Any], source: str = "fleet", directory: Path | None = None
) -> FleetConfig:
    """Check `values`; paths in them are relative to `directory`."""
    try:
        return FleetConfig.model_validate(values, context={"directory": directory or Path()})
    except ValidationError as error:
        raise FleetConfigError(explain(error, source)) from None


def load_fleet(path: Path) -> FleetConfig:
    """Read a YAML file."""
    return parse_fleet(read_mapping(path, FleetConfigError), str(path), path.parent)
