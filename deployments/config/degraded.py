"""The section `degraded`: what is done without the parts that are lost."""

from typing import Annotated

from pydantic import Field

from slo.files.strict_yaml import Section


class DegradedConfig(Section):
    """While no prefill replica is running, decode replicas compute prompts themselves."""

    local_prefill: bool = Field(default=True, description="Otherwise the answer is 503 no_replica.")
    at_once: Annotated[int, Field(ge=1, le=256)] = Field(
        2, description="Prompts that one decode replica computes at once; others wait."
    )
    max_prompts: Annotated[int, Field(ge=1, le=100_000)] = Field(
        64, description="Prompts that one decode replica may have to compute; more are rejected with 429."
    )
    chunk_tokens: Annotated[int, Field(ge=16)] | None = Field(
        None,
        description="Most tokens of a prompt that decode computes in one step, among those of its streams; "
        "by default 512, and 128 on cpu.",
    )
