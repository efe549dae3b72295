"""Workload files of `slackserve bench`: kinds of requests for a mix, or classes for a recorded trace.

Owns what such a file has outermost, and the presets that come with SlackServe, which are such files in
`mixes`. Kinds and classes are `simulator.workload.files`'s; what a mix or a trace then offers is
`simulator.workload.arrivals`'s.
"""

from collections.abc import Callable, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from sys import maxsize
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from deployments.bench import BenchError
from simulator.workload.arrivals import Mix, Record, Trace
from simulator.workload.files import ClassConfig, KindConfig, check_order, named_tiers
from slo.files.strict_yaml import Section, explain, nearest, parse_yaml
from slo.tiers import Tier

PrefillTime = Callable[[int], float]


class WorkloadFile(Section):
    """A mix, `kinds` with on average `burst` requests at once, or `classes` of a trace's requests."""

    kinds: dict[str, KindConfig] = Field(default_factory=dict)
    burst: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    classes: tuple[ClassConfig, ...] = ()

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if bool(self.kinds) == bool(self.classes):
            raise ValueError("give at least one kind under kinds, for a mix, or classes, for a trace")
        check_order(self.classes)
        return self

    def tiers(self) -> set[Tier]:
        """The tiers that it names."""
        return named_tiers(self.kinds, self.classes)

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

    def trace(self, records: Sequence[Record]) -> Trace:
        """As classes of a trace, each with its own objective however long the prompt takes.

        Raises:
            BenchError: when there are no classes.
        """
        if not self.classes:
            raise BenchError("the workload has kinds; a --trace needs one with classes")
        classes = [item.length_class() for item in self.classes]
        return Trace(records, classes, lambda _: 0.0, longest_tokens=maxsize)


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
        hint = nearest(name, presets(), f"there are {', '.join(presets())}, or give a .yaml file")
        raise BenchError(f"--mix: there is no preset {name!r}; {hint}")
    try:
        return _parse(path.read_text(), name)
    except OSError as error:
        raise BenchError(f"--mix: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BenchError(f"--mix: {path} is not a text file") from None


def _directory() -> Traversable:
    return resources.files("deployments") / "mixes"


def _parse(text: str, source: str) -> WorkloadFile:
    try:
        return WorkloadFile.model_validate(parse_yaml(text, source, BenchError))
    except ValidationError as error:
        raise BenchError(explain(error, source)) from None
