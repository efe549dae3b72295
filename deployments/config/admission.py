"""The settings of admission and fairness: what a busy fleet does with whom.

Owns their names, defaults and ranges; the defaults are those of the rules.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from slo.admission.controller import AdmissionRules
from slo.admission.tenant_limits import TenantLimit
from slo.files.strict_yaml import Positive, Section
from slo.queue.ageing import Ageing
from slo.queue.fairness import FairnessRules

_AGEING = Ageing()
_FAIRNESS = FairnessRules()
_ADMISSION = AdmissionRules()
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FairnessConfig(Section):
    """What a replica's queue owes to those that it would leave behind."""

    ageing_per_s: _NotNegative = Field(
        _AGEING.per_s, description="Rise of the effective tier per second of waiting."
    )
    ageing_max: _NotNegative = Field(_AGEING.most, description="The rise ends here.")
    deficit_gain: _NotNegative = Field(
        _AGEING.deficit_gain, description="Rise per unit of share that the class has not had."
    )
    starvation_timeout_s: Positive = Field(
        _FAIRNESS.starvation_timeout_s,
        description="The head of a class below its share leads the queue after so many seconds.",
    )
    memory_s: Positive = Field(
        _FAIRNESS.memory_s, description="Time constant of the account of what was served."
    )

    def rules(self) -> FairnessRules:
        """The same in the vocabulary of the decision rules."""
        ageing = Ageing(self.ageing_per_s, self.ageing_max, self.deficit_gain)
        return FairnessRules(ageing, self.starvation_timeout_s, self.memory_s)


class TenantLimitsConfig(Section):
    """Limits of one tenant; what is not given is not limited."""

    requests_per_s: Positive | None = Field(None, description="Requests per second in the long run.")
    burst_requests: Positive | None = Field(None, description="Requests at once after a pause.")
    tokens_per_s: Positive | None = Field(None, description="Prompt tokens per second in the long run.")
    burst_tokens: Positive | None = Field(None, description="Prompt tokens at once after a pause.")
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests admitted and not ended."
    )
    weight: Positive = Field(1.0, description="Part of a busy class, relative to its other tenants.")

    @model_validator(mode="after")
    def _bursts_of_something(self) -> Self:
        for burst, rate in (("burst_requests", "requests_per_s"), ("burst_tokens", "tokens_per_s")):
            if getattr(self, burst) is not None and getattr(self, rate) is None:
                msg = f"{burst} goes with {rate}"
                raise ValueError(msg)
        return self

    def limit(self) -> TenantLimit:
        """The same in the vocabulary of the decision rules."""
        return TenantLimit(**self.model_dump())


class AdmissionConfig(Section):
    """Who is refused when the fleet cannot serve everybody."""

    pressure: Annotated[float, Field(gt=0, le=1)] = Field(
        _ADMISSION.pressure, description="Load above which classes over their share are refused in part."
    )
    max_refusal: Annotated[float, Field(ge=0, le=1)] = Field(
        _ADMISSION.max_refusal, description="Highest probability of a refusal for the share."
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
    memory_s: Positive = Field(
        _ADMISSION.memory_s, description="Time constant of the account of what arrives."
    )
    min_retry_s: Positive = Field(_ADMISSION.min_retry_s, description="Shortest Retry-After.")
    max_retry_s: Positive = Field(_ADMISSION.max_retry_s, description="Longest Retry-After.")
    default_limits: TenantLimitsConfig = Field(
        TenantLimitsConfig(), description="Limits of each tenant without limits of its own."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_retry_s > self.max_retry_s:
            msg = "min_retry_s is not above max_retry_s"
            raise ValueError(msg)
        return self

    def rules(self) -> AdmissionRules:
        """The same in the vocabulary of the decision rules."""
        return AdmissionRules(**self.model_dump(exclude={"default_limits"}))
