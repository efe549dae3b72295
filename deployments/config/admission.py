"""The settings of admission and fairness: whom a busy fleet refuses, and how long anybody waits.

Owns their names, defaults and ranges; the defaults are those of the rules.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantLimit
from slo.files.strict_yaml import Positive, Section
from slo.queue.fairness import STARVATION_TIMEOUT_S

_ADMISSION = AdmissionRules()
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FairnessConfig(Section):
    """How long a replica's queue may pass somebody over."""

    starvation_timeout_s: Positive = Field(
        STARVATION_TIMEOUT_S,
        description="The oldest request of a class below its share goes first after so many seconds.",
    )


class KeyLimitsConfig(Section):
    """Limits of one key; what is not given is not limited."""

    requests_per_s: Positive | None = Field(None, description="Requests per second in the long run.")
    burst_requests: Positive | None = Field(None, description="Requests at once after a pause.")
    tokens_per_s: Positive | None = Field(None, description="Prompt tokens per second in the long run.")
    burst_tokens: Positive | None = Field(None, description="Prompt tokens at once after a pause.")
    output_tokens_per_s: Positive | None = Field(
        None, description="Generated tokens per second in the long run; a request reserves its max_tokens."
    )
    burst_output_tokens: Positive | None = Field(
        None, description="Generated tokens that may be asked for at once after a pause."
    )
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests admitted and not ended."
    )

    @model_validator(mode="after")
    def _bursts_of_something(self) -> Self:
        for burst, rate in (
            ("burst_requests", "requests_per_s"),
            ("burst_tokens", "tokens_per_s"),
            ("burst_output_tokens", "output_tokens_per_s"),
        ):
            if getattr(self, burst) is not None and getattr(self, rate) is None:
                msg = f"{burst} goes with {rate}"
                raise ValueError(msg)
        return self

    def limit(self) -> TenantLimit:
        """The same in the vocabulary of the decision rules."""
        return TenantLimit(**self.model_dump())


class TenantLimitsConfig(KeyLimitsConfig):
    """Limits of one tenant, and its part where they do not decide."""

    weight: Positive = Field(1.0, description="Part of a busy class, relative to its other tenants.")


class AdmissionConfig(Section):
    """Who is refused when the fleet cannot serve everybody."""

    pressure: Annotated[float, Field(gt=0, le=1)] = Field(
        _ADMISSION.pressure, description="Load above which classes over their share are refused in part."
    )
    reserved: Annotated[float, Field(ge=0, lt=1)] = Field(
        _ADMISSION.reserved, description="Fraction of prefill time that is kept for the top tier."
    )
    calm_s: _NotNegative = Field(
        _ADMISSION.calm_s, description="A class with a shorter queue is not refused for its share."
    )
    max_backlog_s: Positive = Field(
        _ADMISSION.max_backlog_s, description="A class whose queue would take longer is refused."
    )
    max_late_backlog_s: Positive = Field(
        _ADMISSION.max_late_backlog_s,
        description="Likewise for a tier that may not be shed, if its objective is not longer than that.",
    )
    default_limits: TenantLimitsConfig = Field(
        TenantLimitsConfig(), description="Limits of each tenant without limits of its own."
    )

    def rules(self) -> AdmissionRules:
        """The same in the vocabulary of the decision rules."""
        return AdmissionRules(**self.model_dump(exclude={"default_limits"}))
