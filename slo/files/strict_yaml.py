"""YAML files that are read strictly: an unknown key is refused with the nearest valid one.

Owns how such files are read and how complaints about them are worded. What a file may say, and which error
its reader raises, is its own module's.
"""

import difflib
import ipaddress
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from yaml.error import MarkedYAMLError
from yaml.scanner import ScannerError

from slo.objectives import MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS
from slo.tiers import Tier, check_tier_name

ObjectiveMs = Annotated[float, Field(ge=MIN_OBJECTIVE_MS, le=MAX_OBJECTIVE_MS, allow_inf_nan=False)]
API_KEYS = "api_keys"
"""The key of a file under which stand secrets."""
_MERGE = "tag:yaml.org,2002:merge"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _named_address(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty; give an address, such as 127.0.0.1, or 0.0.0.0 for all of the machine's")
    try:
        if ":" in value:
            ipaddress.IPv6Address(value)
        value.encode("idna")
    except ValueError:  # as of an empty label
        is_one = False
    else:
        is_one = value.isprintable() and not any(each in " /[]" for each in value)
    if not is_one:
        raise ValueError(
            f"{value!r} is neither an address nor a name; give one without a port, brackets or a scheme, "
            "such as 127.0.0.1 or ::1"
        )
    return value


Address = Annotated[str, AfterValidator(_named_address)]
"""Where something listens; the system takes nothing for every address there is."""


class _KeyGivenTwiceError(ValueError):
    """A key is there twice under one head."""

    def __init__(self, key: str, line: int, first: int) -> None:
        super().__init__(key, line, first)
        self._key, self._line, self._first = key, line, first

    def told(self, *, with_key: bool) -> str:
        """Both lines, and the key."""
        what = f"the key {self._key!r}" if with_key else "a key"
        return f"line {self._line}: {what} is given twice, first in line {self._first}; leave out one"


class _Loader(yaml.SafeLoader):
    """YAML's safe types, whatever a library makes of them in the loader that a process shares.

    lm-format-enforcer, which an engine may import for a grammar, has dates read as text there. A key that is
    there twice is refused; YAML's own loader drops the first.
    """

    yaml_constructors: ClassVar[dict[str | None, Any]] = yaml.SafeLoader.yaml_constructors | {
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_timestamp
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Keys and values as they are written: before `<<` is resolved, whose keys may be there again."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise _KeyGivenTwiceError(key.value, line, lines[name])
            lines[name] = line
        return node


class FleetConfigError(Exception):
    """A fleet file that cannot be used; the message names the key and what would be right."""


class Section(BaseModel):
    """A part of a file: unknown keys are refused, with the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tells_unknown_keys: ClassVar[bool] = True
    """Whether a complaint names them: what stands where a key belongs may be a secret that lost its own."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values:
                if key not in cls.model_fields:
                    name = f" {key!r}" if cls.tells_unknown_keys else ""
                    raise ValueError(f"unknown key{name}; {nearest(str(key), cls.model_fields)}")
        return values


def nearest(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """What may have been meant by a word that is not known, or `otherwise`; by default what is known."""
    names = [*known]
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"known are {', '.join(names)}"


def known_name(what: str, value: Any, known: Collection[str]) -> Any:
    """A name that must be known; what is not a name is left to be checked elsewhere."""
    if isinstance(value, str) and value not in known:
        raise ValueError(f"there is no {what} {value!r}; {nearest(value, known)}")
    return value


def _tier_name(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("expected the name of a tier")  # noqa: TRY004 - pydantic wants it
    check_tier_name(value)
    return value


TierName = Annotated[Tier, BeforeValidator(_tier_name)]
"""The name of a tier that requests may ask for, whether or not there is one."""


def read_mapping(path: Path, refusal: type[Exception]) -> dict[str, Any]:
    """The keys and values of a file.

    Raises:
        refusal: when it cannot be read, is not YAML or is something else than keys and values.
    """
    values = read_yaml(path, refusal)
    if not isinstance(values, dict):
        raise refusal(f"{path}: expected keys and values, found {type(values).__name__}")
    return values


def read_yaml(path: Path, refusal: type[Exception], *, is_quoted: bool = True) -> Any:
    """What a file holds; no keys when it is empty.

    Args:
        path: The file.
        refusal: What is raised.
        is_quoted: Whether complaints quote the file; one with secrets is not.

    Raises:
        refusal: when it cannot be read or is not YAML.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise refusal(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise refusal(f"{path}: is not YAML: {error}") from None
    return parse_yaml(text, str(path), refusal, is_quoted=is_quoted)


def parse_yaml(text: str, source: str, refusal: type[Exception], *, is_quoted: bool = True) -> Any:
    """What a text holds; no keys when it is empty. Arguments as of `read_yaml`.

    Raises:
        refusal: when it is not YAML, or a key is given twice.
    """
    try:
        values = yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    except _KeyGivenTwiceError as error:
        raise refusal(f"{source}: {error.told(with_key=is_quoted)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2026-06-31 is a ValueError
        raise refusal(f"{source}: is not YAML{f': {error}' if is_quoted else _unquoted(error)}") from None
    return {} if values is None else values


def _unquoted(error: Exception) -> str:
    """Where a text is no YAML, and why as far as that quotes no more than one character of it."""
    if isinstance(error, ValueError):
        return ": a date or a number is none"
    if not isinstance(error, MarkedYAMLError) or (at := error.problem_mark) is None:
        return ""
    why = f": {error.problem}" if isinstance(error, ScannerError) else ""  # others quote tags and anchors
    return f": line {at.line + 1}, column {at.column + 1}{why}"


def explain(error: ValidationError, source: str) -> str:
    """All of a validation error's complaints, one a line, each with its key and what was given.

    What stands under `API_KEYS` is not told: such messages go to logs.
    """
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "top level"
        given = item.get("input")
        is_shown = isinstance(given, str | int | float | bool) and API_KEYS not in item["loc"]
        shown = f" (given: {given!r})" if is_shown else ""
        lines.append(f"{source}: {key}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return "\n".join(lines)
