"""The section `tracing`: where spans of requests go, and of how many requests."""

from typing import Annotated

from pydantic import Field, field_validator

from deployments.config import ConfigError
from slo.files.strict_yaml import Section
from telemetry.tracing import USUAL_RATIO, TracingOptions


class TracingConfig(Section):
    """Without an endpoint, here or in the environment that has Ray Serve trace with us, nothing is traced."""

    endpoint: str | None = Field(
        None, description="URL of an OTLP receiver that speaks gRPC, for example http://collector:4317."
    )
    ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        USUAL_RATIO, description="Fraction of requests without a traceparent of their own that are traced."
    )

    @field_validator("endpoint")
    @classmethod
    def _url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            msg = f"give a URL, as http://collector:4317, not {endpoint!r}"
            raise ValueError(msg)
        return endpoint

    def options(self) -> TracingOptions | None:
        """What the processes are told; None for nothing to trace.

        Raises:
            ConfigError: when the environment does not say all that it has to.
        """
        if self.endpoint is not None:
            return TracingOptions(self.endpoint, self.ratio)
        try:
            return TracingOptions.from_environment()
        except ValueError as error:
            raise ConfigError(f"tracing: {error}") from None
