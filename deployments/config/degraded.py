"""The section `degraded`: what is done without the parts that are lost, and which prompts decode computes."""

from typing import Annotated

from pydantic import Field

from slo.files.strict_yaml import Section


class DegradedConfig(Section):
    """How decode replicas compute prompts themselves: those that only they can, and all without prefill."""

    local_prefill: bool = Field(
        default=True, description="Without a prefill replica; otherwise the answer is 503 no_replica then."
    )
    at_once: Annotated[int, Field(ge=1, le=256)] = Field(
        2, description="Prompts that one decode replica computes at once; others wait."
    )
    max_prompts: Annotated[int, Field(ge=1, le=100_000)] = Field(
        64,
        description="Prompts that one decode replica may have to compute, once for each answer; then tenants "
        "with their part of them are refused with 429, and all when there are twice as many.",
    )
    chunk_tokens: Annotated[int, Field(ge=16)] | None = Field(
        None,
        description="Most tokens of a prompt that decode computes in one step, among those of its streams; "
        "by default 512, and 128 on cpu.",
    )
