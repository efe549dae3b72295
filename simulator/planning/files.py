"""A user's own fleet, as a YAML file, and what it stands for in the simulation.

Owns the names, units and defaults of the file. What a model takes on an accelerator is
`simulator.cost.accelerators`'s.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from router.placement.registry import PlacementName
from simulator.arms.arms import ARMS
from simulator.cost.accelerators import CHIPS, MODELS, Chip, calibrated_cost_model, cost_model, decode_model
from simulator.cost.decode_steps import DecodeModel
from simulator.cost.operators import ModelShape
from simulator.cost.passes import CostModel
from simulator.fleet.setup import FleetSetup
from simulator.planning.hardware_files import (
    ChipConfig,
    DecodePoolConfig,
    LinkConfig,
    Ranks,
    ShapeConfig,
    chip_of,
    room_for_kv,
)
from simulator.planning.plan import PlannedLoad
from simulator.replica.hardware import Hardware
from simulator.workload.arrivals import TraceError
from simulator.workload.files import Tokens, WorkloadConfig, beside
from slo.files.profile import read_profile, read_whole_profile
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


class FleetConfig(Section):
    """A fleet and its load."""

    model: str | ShapeConfig = "llama-3-8b"
    accelerator: str | ChipConfig = "a100"
    tensor_parallel: Ranks = 1
    profile: Path | None = Field(
        None, description="Prefill times from `slackserve calibrate`, instead of what the accelerator offers."
    )
    kv_tokens: Tokens | None = Field(
        None, description="Of a prefill replica; by default what is left beside the weights."
    )
    arm: str = Field("slackserve", description="How prefill replicas are run.")
    placement: PlacementName | None = None
    link: LinkConfig = LinkConfig()
    decode: DecodePoolConfig = DecodePoolConfig()
    handoff_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="What the router is told of the time after a prefill; by default it is derived."
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
    seed: int = 1

    @field_validator("model", "accelerator", "arm", mode="before")
    @classmethod
    def _known_names(cls, value: Any, info: ValidationInfo) -> Any:
        known: dict[str, Mapping[str, Any]] = {"model": MODELS, "accelerator": CHIPS, "arm": ARMS}
        assert info.field_name is not None
        return known_name(info.field_name, value, known[info.field_name])

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

    @field_validator("profile")
    @classmethod
    def _beside_the_file(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        return beside(path, info)

    def setup(self, prefill_replicas: int = 1, decode_replicas: int = 1) -> FleetSetup:
        """The fleet with so many replicas.

        Raises:
            FleetConfigError: when the model does not fit, or the profile cannot be used.
        """
        tiers = tier_set(self.tiers)
        kv = self.kv_tokens or room_for_kv(
            "the prefill replicas", self._shape(), self._chip(), self.tensor_parallel
        )
        return FleetSetup(
            arm=ARMS[self.arm],
            hardware=Hardware(self._cost(), kv, tiers),
            prefill_replicas=prefill_replicas,
            decode_replicas=decode_replicas,
            decode=self._decode(),
            link=self._link(),
            tiers=tiers,
            placement=self.placement,
            handoff_s=None if self.handoff_ms is None else self.handoff_ms / 1e3,
            seed=self.seed,
        )

    def demand(self) -> PlannedLoad:
        """The load.

        Raises:
            FleetConfigError: when the trace or the profile cannot be read.
        """
        requests = self.requests or max(_FEWEST_REQUESTS, math.ceil(self.rate_rps * _SPAN_S))
        try:
            workload = self.workload.workload(self._cost().prefill_s, tier_set(self.tiers).default)
        except TraceError as error:
            raise FleetConfigError(f"workload.trace: {error}") from None
        return PlannedLoad(workload, self.rate_rps, requests, self.seed, self.target)

    def _shape(self) -> ModelShape:
        return MODELS[self.model] if isinstance(self.model, str) else self.model.shape()

    def _chip(self) -> Chip:
        return chip_of(self.accelerator)

    def _cost(self) -> CostModel:
        if self.profile is not None:
            return calibrated_cost_model(self._shape(), read_profile(self.profile, FleetConfigError))
        return cost_model(self._shape(), self._chip(), self.tensor_parallel)

    def _link(self) -> Link:
        """What the file says; else what a profile has measured; else the default."""
        if self.profile is not None and "link" not in self.model_fields_set:
            profile = read_whole_profile(self.profile, FleetConfigError)
            return profile.link(self._shape().kv_bytes_per_token) or self.link.link()
        return self.link.link()

    def _decode(self) -> DecodeModel:
        pool = self.decode
        chip = self._chip() if pool.accelerator is None else chip_of(pool.accelerator)
        ranks = pool.tensor_parallel or self.tensor_parallel
        kv = pool.kv_tokens or room_for_kv("the decode replicas", self._shape(), chip, ranks)
        return decode_model(self._shape(), chip, ranks, kv, pool.max_batch)


def parse_fleet(
    values: Mapping[str, Any], source: str = "fleet", directory: Path | None = None
) -> FleetConfig:
    """Check `values`; paths in them are relative to `directory`.

    Raises:
        FleetConfigError: naming each wrong key and what would be right.
    """
    try:
        return FleetConfig.model_validate(values, context={"directory": directory or Path()})
    except ValidationError as error:
        raise FleetConfigError(explain(error, source)) from None


def load_fleet(path: Path) -> FleetConfig:
    """Read a YAML file.

    Raises:
        FleetConfigError: when it cannot be read, is not YAML, or holds values that cannot be used.
    """
    return parse_fleet(read_mapping(path, FleetConfigError), str(path), path.parent)
