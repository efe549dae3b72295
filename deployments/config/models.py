"""The section `models`: further models of one application, each with replicas of its own.

What an entry leaves out is the deployment's own, key by key, but for what belongs to one model alone: its
name, length, profile, adapters, engine arguments, and what is known of its KV.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from deployments.config.lora import LoraConfig
from deployments.config.replicas import KVTransferConfig, PoolConfig
from slo.files.strict_yaml import Section
from slo.objectives import MAX_OBJECTIVE_MS


def _no_dashes(name: str) -> str:
    if "--" in name:
        raise ValueError("a model's name has no two dashes in a row, which stand for a slash elsewhere")
    return name


ModelName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"), AfterValidator(_no_dashes)
]


def _no_blanks(name: str) -> str:
    if not name or name != name.strip():
        raise ValueError("give a name without blanks around it, or leave it out")
    return name


GivenName = Annotated[str, AfterValidator(_no_blanks)]
PORTS_APART: Final = 100
"""The side channels of a model begin so many ports after those of the one before it."""


class PartOfPool(PoolConfig):
    """What a further model says of one tier; whether its bounds fit is asked once the rest is known."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        return self


class ModelSection(Section):
    """One further model."""

    model: Annotated[str, Field(min_length=1)] = Field(description="Hugging Face id or directory.")
    prefill: PartOfPool | None = Field(
        None, description="What is left out is as the deployment's, but for engine_kwargs."
    )
    decode: PartOfPool | None = Field(
        None, description="What is left out is as the deployment's, but for engine_kwargs."
    )
    lora: LoraConfig = LoraConfig()
    kv_transfer: KVTransferConfig | None = Field(
        None,
        description="What is left out is as the deployment's, but for the link; ports that are not named "
        "begin 100 after those of the model before it.",
    )
    accelerator_type: str | None = Field(None, description="By default as the deployment's.")
    dtype: str | None = Field(None, description="By default as the deployment's.")
    max_model_len: Annotated[int, Field(ge=64)] | None = Field(
        None, description="Longest prompt plus output, tokens; by default what the model allows."
    )
    kv_cache_gib: Annotated[int, Field(ge=1)] | None = Field(
        None, description="By default as the deployment's."
    )
    profile: Path | None = Field(
        None, description="Prefill times written by `slackserve calibrate`; none measures at start."
    )
    handoff_ms: Annotated[float, Field(ge=0, le=MAX_OBJECTIVE_MS)] | None = Field(
        None, description="By default as the deployment's."
    )
    warmup_tokens: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, min_length=2, description="By default as the deployment's."
    )

    def instead_of(self, deployment: Mapping[str, Any], place: int) -> dict[str, Any]:
        """What this model has instead of the deployment's own, by key; sections as keys and values.

        Args:
            deployment: The deployment's, by key.
            place: Among all models; the deployment's own is 0.
        """
        given = {key: getattr(self, key) for key in type(self).model_fields}
        own = {key: value for key, value in given.items() if value is not None}
        own |= {key: given[key] for key in ("profile", "max_model_len", "lora")}
        one_models: dict[str, Any] = {"engine_kwargs": {}}
        if self.accelerator_type is not None:
            one_models["accelerator_type"] = None
        for pool in ("prefill", "decode"):
            own[pool] = _over(deployment[pool], one_models, given[pool])
        transfer: KVTransferConfig = deployment["kv_transfer"]
        apart = {key: getattr(transfer, key) + place * PORTS_APART for key in ("prefill_port", "decode_port")}
        own["kv_transfer"] = _over(transfer, {"link": None, **apart}, given["kv_transfer"])
        return own


def _over(deployment: Section, one_models: Mapping[str, Any], given: Section | None) -> dict[str, Any]:
    """A section of the deployment with what belongs to one model alone, and what is given, in its place."""
    values = {key: getattr(deployment, key) for key in type(deployment).model_fields}
    named = {} if given is None else {key: getattr(given, key) for key in given.model_fields_set}
    return values | dict(one_models) | named
