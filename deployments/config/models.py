"""The section `models`: further models of one application, each with replicas of its own.

What an entry leaves out is the deployment's own, but for what belongs to one model alone: its name, length,
profile, adapters, and what is known of its KV.
"""

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints

from deployments.config.lora import LoraConfig
from deployments.config.replicas import KVTransferConfig, PoolConfig
from slo.files.strict_yaml import Section
from slo.objectives import MAX_OBJECTIVE_MS

ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
_PORTS_APART: Final = 100
"""The side channels of a model begin so many ports after those of the one before it."""


class ModelSection(Section):
    """One further model."""

    model: Annotated[str, Field(min_length=1)] = Field(description="Hugging Face id or directory.")
    prefill: PoolConfig | None = Field(None, description="By default as the deployment's.")
    decode: PoolConfig | None = Field(None, description="By default as the deployment's.")
    lora: LoraConfig = LoraConfig()
    kv_transfer: KVTransferConfig | None = Field(
        None,
        description="By default as the deployment's, without its link; ports that are not named begin 100 "
        "after those of the model before it.",
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

    def instead_of(self, transfer: KVTransferConfig, place: int) -> dict[str, Any]:
        """What this model has instead of the deployment's own, by key.

        Args:
            transfer: The deployment's.
            place: Among all models; the deployment's own is 0.
        """
        given = {key: getattr(self, key) for key in type(self).model_fields}
        own = {key: value for key, value in given.items() if value is not None}
        own |= {key: given[key] for key in ("profile", "max_model_len", "lora")}
        named = self.kv_transfer or transfer.model_copy(update={"link": None})
        ports = {
            key: getattr(transfer, key) + place * _PORTS_APART
            for key in ("prefill_port", "decode_port")
            if self.kv_transfer is None or key not in self.kv_transfer.model_fields_set
        }
        return own | {"kv_transfer": named.model_copy(update=ports)}
