"""The section `tracing`: where spans of requests go, and of how many requests."""

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

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
        if endpoint is not None and not _has_a_host_and_port(endpoint):
            msg = f"give a URL, as http://collector:4317, not {endpoint!r}"
            raise ValueError(msg)
        return endpoint

    @model_validator(mode="after")
    def _ratio_of_an_endpoint(self) -> Self:
        if self.endpoint is None and "ratio" in self.model_fields_set:
            msg = "ratio goes with endpoint; where that is in the environment, set OTEL_TRACES_SAMPLER_ARG"
            raise ValueError(msg)
        return self

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


def _has_a_host_and_port(url: str) -> bool:
    """Without a port gRPC takes 443, which only `https` means."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return False
    return parts.scheme == "https" if port is None else port > 0
