"""The section `lora`: adapters that are served beside the model, as models of their own names."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from slo.files.strict_yaml import Section

AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]


class LoraConfig(Section):
    """LoRA adapters of the model."""

    adapters: dict[AdapterName, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        max_length=64,
        description="What clients call each adapter, and where it is: a directory as PEFT saves it, or a "
        "Hugging Face id.",
    )
    max_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] | None = Field(
        None,
        description="The rank that there is room for; by default that of the adapters in directories, at "
        "least 16.",
    )
