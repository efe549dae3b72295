"""What arrives, as files say it: kinds of requests, or a recorded trace and the classes of its requests.

Owns the part of a fleet file that says so. Workload files of `slackserve bench` have kinds and classes too.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from simulator.workload.arrivals import Kind, LengthClass, Mix, Trace, Workload, read_trace
from slo.files.strict_yaml import ObjectiveMs, Positive, Section, TierName
from slo.tiers import DEFAULT_TIERS, Tier

Tokens = Annotated[int, Field(ge=1, le=10_000_000)]


def _beside(path: Path, info: ValidationInfo) -> Path:
    directory: Path = (info.context or {}).get("directory", Path())
    return directory / path


PathBesideFile = Annotated[Path, AfterValidator(_beside)]
"""A path in a file, which is meant relative to the file."""


class KindConfig(Section):
    """A kind of requests. Its prompts have `mean_tokens`, or lie evenly in `range_tokens`."""

    share: Positive = Field(description="Of the requests; shares are normalised.")
    mean_tokens: Positive | None = Field(None, description="Mean of log-normal prompt lengths.")
    sigma: Positive = Field(0.6, description="Standard deviation of their logarithm.")
    range_tokens: tuple[Tokens, Tokens] = Field((16, 32_000), description="Shortest and longest prompt.")
    is_uniform: bool = Field(default=False, description="Log-uniform in range_tokens, without a mean.")
    output_tokens: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        200.0, description="Mean number of tokens to generate, geometric."
    )
    ttft_ms: ObjectiveMs | None = None
    ttft_scale: tuple[Positive, Positive] | None = Field(
        None, description="Instead of ttft_ms: bounds of a factor on the prompt's own prefill time."
    )
    tier: TierName | None = Field(None, description="By default the default tier.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.range_tokens[0] > self.range_tokens[1]:
            raise ValueError("range_tokens gives the shortest prompt first")
        if self.is_uniform == (self.mean_tokens is not None):
            raise ValueError("give mean_tokens, or range_tokens with is_uniform: true")
        low, high = self.range_tokens
        if self.mean_tokens is not None and not low <= self.mean_tokens <= high:
            raise ValueError(
                f"mean_tokens, {self.mean_tokens:g}, lies outside of range_tokens, {low} to {high}, "
                "to which lengths are held: give both"
            )
        if self.ttft_ms is not None and self.ttft_scale is not None:
            raise ValueError("give ttft_ms or ttft_scale, not both")
        return self

    def kind(self, default_tier: Tier = DEFAULT_TIERS.default) -> Kind:
        """The same for the workload, seconds."""
        return Kind(
            **self.model_dump(exclude={"mean_tokens", "ttft_ms", "tier"}),
            mean_tokens=self.mean_tokens or 0.0,
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tier=self.tier or default_tier,
        )


class ClassConfig(Section):
    """What a trace's requests of up to `max_prompt_tokens` are taken for; without it, all that are longer.

    It is the recorded length that counts, to whatever `slackserve bench --scale` or `--max-tokens` cuts it.
    """

    kind: Annotated[str, Field(min_length=1)]
    max_prompt_tokens: Tokens | None = None
    ttft_ms: ObjectiveMs
    tier: TierName | None = Field(None, description="By default the default tier.")

    def length_class(self, default_tier: Tier = DEFAULT_TIERS.default) -> LengthClass:
        """The same for the workload, seconds."""
        return LengthClass(
            self.max_prompt_tokens or inf, self.kind, self.ttft_ms / 1e3, self.tier or default_tier
        )


def check_order(classes: Sequence[ClassConfig]) -> None:
    """Check that every length has its class."""
    bounds = [item.max_prompt_tokens or inf for item in classes]
    if classes and (bounds[-1] != inf or any(low >= high for low, high in pairwise(bounds))):
        raise ValueError("classes go from short to long, and the last one has no max_prompt_tokens")


def named_tiers(kinds: Mapping[str, KindConfig], classes: Sequence[ClassConfig]) -> set[Tier]:
    """The tiers that these name."""
    named = [*(kind.tier for kind in kinds.values()), *(item.tier for item in classes)]
    return {tier for tier in named if tier is not None}


class WorkloadConfig(Section):
    """A mix, `kinds` with on average `burst` at once, or a `trace` with `classes` of its requests."""

    kinds: dict[str, KindConfig] = Field(default_factory=dict)
    burst: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    trace: PathBesideFile | None = Field(
        None, description="A .jsonl trace in Mooncake's format or a .csv trace in Azure's, beside this file."
    )
    classes: tuple[ClassConfig, ...] = ()
    stretch: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        2.0, description="An objective of a trace's request is at least this many times its own prefill time."
    )
    longest_tokens: Tokens = Field(131_072, description="Longer prompts of a trace are left out.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if bool(self.kinds) == (self.trace is not None):
            raise ValueError("give at least one kind under kinds, for a mix, or trace and classes")
        if bool(self.classes) != (self.trace is not None):
            raise ValueError("trace and classes go together")
        check_order(self.classes)
        return self

    def tiers(self) -> set[Tier]:
        """The tiers that it names."""
        return named_tiers(self.kinds, self.classes)

    def workload(
        self, prefill_s: Callable[[int], float], default_tier: Tier = DEFAULT_TIERS.default
    ) -> Workload:
        """What arrives; objectives may depend on what a prompt takes alone."""
        if self.trace is None:
            return Mix(
                {name: kind.kind(default_tier) for name, kind in self.kinds.items()}, self.burst, prefill_s
            )
        classes = [item.length_class(default_tier) for item in self.classes]
        return Trace(read_trace(self.trace), classes, prefill_s, self.stretch, self.longest_tokens)
