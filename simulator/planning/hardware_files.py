"""The parts of a fleet file that say what it runs on: model, accelerators, link."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from simulator.cost.accelerators import CHIPS, Chip, kv_tokens
from simulator.cost.operators import ModelShape
from simulator.workload.files import Tokens
from slo.files.strict_yaml import FleetConfigError, Positive, Section, known_name
from slo.predict.handoff import Link

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
        return Chip(
            "own",
            self.peak_tflops * 1e12,
            self.memory_gb_ps * 1e9,
            self.memory_gb * 1e9,
            self.link_gb_ps * 1e9,
        )


class LinkConfig(Section):
    """What KV cache moves over from prefill to decode, into each decode replica."""

    gb_ps: Positive = Field(25.0, description="GB per second.")
    latency_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0

    def link(self) -> Link:
        """The same in bytes and seconds."""
        return Link(self.gb_ps * 1e9, self.latency_ms / 1e3)


class DecodePoolConfig(Section):
    """Decode replicas; what is not given is as for prefill."""

    accelerator: str | ChipConfig | None = None
    tensor_parallel: Ranks | None = None
    kv_tokens: Tokens | None = Field(None, description="By default what is left beside the weights.")
    max_batch: Count = 256

    @field_validator("accelerator", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return known_name("accelerator", value, CHIPS)


def chip_of(value: str | ChipConfig) -> Chip:
    """An accelerator by its name or its numbers."""
    return CHIPS[value] if isinstance(value, str) else value.chip()


def room_for_kv(whose: str, shape: ModelShape, chip: Chip, ranks: int) -> int:
    """Tokens whose KV fits beside the weights.

    Raises:
        FleetConfigError: when these do not fit.
    """
    tokens = kv_tokens(shape, chip, ranks)
    if tokens <= 0:
        memory_gb = ranks * chip.memory_bytes / 1e9
        raise FleetConfigError(
            f"the model does not fit into the {memory_gb:.0f} GB of {whose}; raise tensor_parallel, "
            "or give kv_tokens if it is quantised"
        )
    return tokens
