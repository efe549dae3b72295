"""The section `pressure`: what decode replicas do when KV memory or pace runs short."""

from pydantic import Field

from slo.files.strict_yaml import Section


class PressureConfig(Section):
    """Who yields on a decode replica, and who gets on it first."""

    enabled: bool = Field(
        default=False,
        description="Memory is taken by tier and cost and given back in order, newcomers wait for the "
        "predicted peak, and TPOT objectives act; otherwise vLLM's own scheduler decides.",
    )
