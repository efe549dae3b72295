"""Workload files of `slackserve bench`: kinds of requests for a mix, or classes for a recorded trace.

Owns the format of the files and the presets that come with SlackServe, which are such files in `mixes`. What
a mix or a trace then offers is `simulator.workload`'s.
"""

import difflib
from collections.abc import Callable, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from math import inf
from pathlib import Path
from sys import maxsize
from typing import Annotated, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from deployments.bench_errors import BenchError
from deployments.config import ObjectiveMs, Positive, Section, explain
from simulator.workload import Kind, LengthClass, Mix, Record, Trace
from slo.tiers import Tier

PrefillTime = Callable[[int], float]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]


class KindConfig(Section):
    """A kind of requests in a mix. Its prompts have `mean_tokens`, or lie evenly in `range_tokens`."""

    share: Positive = Field(description="Of the requests; shares are normalised.")
    mean_tokens: Positive | None = Field(None, description="Mean of log-normal prompt lengths.")
    sigma: Positive = Field(0.6, description="Standard deviation of their logarithm.")
    range_tokens: tuple[Tokens, Tokens] = Field((16, 32_000), description="Shortest and longest prompt.")
    is_uniform: bool = Field(default=False, description="Log-uniform in range_tokens, without a mean.")
    output_tokens: Positive = Field(200.0, description="Mean number of tokens to generate, geometric.")
    ttft_ms: ObjectiveMs | None = None
    ttft_scale: tuple[Positive, Positive] | None = Field(
        None, description="Instead of ttft_ms: bounds of a factor on the prompt's own prefill time."
    )
    tier: Tier = Tier.STANDARD

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.range_tokens[0] > self.range_tokens[1]:
            raise ValueError("range_tokens gives the shortest prompt first")
        if self.is_uniform == (self.mean_tokens is not None):
            raise ValueError("give mean_tokens, or range_tokens with is_uniform: true")
        if self.ttft_ms is not None and self.ttft_scale is not None:
            raise ValueError("give ttft_ms or ttft_scale, not both")
        return self

    def kind(self) -> Kind:
        """The same for the workload, seconds."""
        return Kind(
            share=self.share,
            mean_tokens=self.mean_tokens or 0.0,
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tier=self.tier,
            sigma=self.sigma,
            output_tokens=self.output_tokens,
            range_tokens=self.range_tokens,
            is_uniform=self.is_uniform,
            ttft_scale=self.ttft_scale,
        )


class ClassConfig(Section):
    """What a trace's requests of up to `most_tokens` are taken for; without it, all that are longer."""

    kind: Annotated[str, Field(min_length=1)]
    most_tokens: Tokens | None = None
    ttft_ms: ObjectiveMs
    tier: Tier

    def length_class(self) -> LengthClass:
        """The same for the workload, seconds."""
        return LengthClass(self.most_tokens or inf, self.kind, self.ttft_ms / 1e3, self.tier)


class WorkloadFile(Section):
    """A mix, `kinds` with on average `burst` requests at once, or `classes` of a trace's requests."""

    kinds: dict[str, KindConfig] = Field(default_factory=dict)
    burst: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    classes: tuple[ClassConfig, ...] = ()

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if bool(self.kinds) == bool(self.classes):
            raise ValueError("give at least one kind under kinds, for a mix, or classes, for a trace")
        bounds = [item.most_tokens or inf for item in self.classes]
        if self.classes and (bounds[-1] != inf or any(low >= high for low, high in pairwise(bounds))):
            raise ValueError("classes go from short to long, and the last one has no most_tokens")
        return self

    def mix(self, prefill_s: PrefillTime | None) -> Mix:
        """As a mix.

        Raises:
            BenchError: when there are no kinds, or a kind needs prefill times and there are none.
        """
        if not self.kinds:
            raise BenchError("the workload has classes only, which need a --trace")
        for name, kind in self.kinds.items():
            if kind.ttft_scale is not None and prefill_s is None:
                raise BenchError(f"kinds.{name}.ttft_scale needs --profile, prefill times to multiply")
        return Mix({name: kind.kind() for name, kind in self.kinds.items()}, self.burst, prefill_s)

    def trace(self, records: Sequence[Record], prefill_s: PrefillTime | None) -> Trace:
        """As classes of a trace.

        Raises:
            BenchError: when there are no classes.
        """
        if not self.classes:
            raise BenchError("the workload has kinds; a --trace needs one with classes")
        classes = [item.length_class() for item in self.classes]
        return Trace(records, classes, prefill_s or (lambda _: 0.0), longest_tokens=maxsize)


def presets() -> list[str]:
    """The names of the workloads that come with SlackServe."""
    return sorted(path.name.removesuffix(".yaml") for path in _directory().iterdir())


def load_workload(name: str) -> WorkloadFile:
    """A preset by its name, or a YAML file.

    Raises:
        BenchError: when there is neither, or it cannot be used.
    """
    if name in presets():
        return _parse((_directory() / f"{name}.yaml").read_text(), name)
    path = Path(name)
    if path.suffix not in {".yaml", ".yml"}:
        near = difflib.get_close_matches(name, presets(), n=1, cutoff=0.5)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(presets())}, or give a .yaml file"
        )
        raise BenchError(f"--mix: there is no preset {name!r}; {hint}")
    try:
        return _parse(path.read_text(), name)
    except OSError as error:
        raise BenchError(f"--mix: {path} cannot be read: {error.strerror}") from None


def _directory() -> Traversable:
    return resources.files("deployments") / "mixes"


def _parse(text: str, source: str) -> WorkloadFile:
    try:
        return WorkloadFile.model_validate(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise BenchError(f"{source}: is not YAML: {error}") from None
    except ValidationError as error:
        raise BenchError(explain(error, source)) from None
