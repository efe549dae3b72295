"""YAML files that are read strictly: an unknown key is refused with the nearest valid one.

Owns how such files are read and how complaints about them are worded. What a file may say, and which error
its reader raises, is its own module's.
"""

import difflib
import ipaddress
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from yaml.constructor import ConstructorError
from yaml.error import MarkedYAMLError
from yaml.scanner import ScannerError

from slo.objectives import MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS
from slo.tiers import Tier, check_tier_name

ObjectiveMs = Annotated[float, Field(ge=MIN_OBJECTIVE_MS, le=MAX_OBJECTIVE_MS, allow_inf_nan=False)]
API_KEYS = "api_keys"
"""The key of a file under which stand secrets."""
_MERGE, _INTEGER, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))
_OCTAL = re.compile(r"[-+]?0[0-7_]")
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


class _SurelyNotMeantError(ValueError):
    """What YAML reads otherwise than whoever wrote it meant.

    Args:
        why: What it is.
        unquoted: The same without a word of the text.
    """

    def __init__(self, why: str, unquoted: str) -> None:
        super().__init__(why)
        self.unquoted = unquoted


class _Loader(yaml.SafeLoader):
    """YAML's safe types, whatever a library makes of them in the loader that a process shares.

    lm-format-enforcer, which an engine may import for a grammar, has dates read as text there. A key that is
    there twice is refused; YAML's own loader drops the first. So is a number to the base of 8 or 60, which
    looks like another.
    """

    yaml_constructors: ClassVar[dict[str | None, Any]] = yaml.SafeLoader.yaml_constructors | {
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_timestamp
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's
        """A value by its tag; for what is none of a tag that is given, PyYAML's own code may fail."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, KeyError):
            raise ConstructorError(None, None, "a value is none of its tag", node.start_mark) from None

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        """Numbers as they are written; `index` is the key of a value."""
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and (read := self._misread(node)) is not None:
            line = f"line {node.start_mark.line + 1}: "
            key = f"{index.value}: " if isinstance(index, yaml.ScalarNode) else ""
            raise _SurelyNotMeantError(
                f"{line}{key}YAML reads {node.value} as {read}; "
                "write a number without leading zeros and colons, and text in quotes",
                f"{line}a number has leading zeros or colons; write it without, and text in quotes",
            )
        return node

    def _misread(self, node: yaml.ScalarNode) -> float | None:
        """What YAML makes of a number to the base of 8 or 60; None of anything else."""
        if node.tag == _INTEGER and (":" in node.value or _OCTAL.match(node.value)):
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node) if node.tag == _FLOAT and ":" in node.value else None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Keys and values as they are written: before `<<` is resolved, whose keys may be there again."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                twice = f"is given twice, first in line {lines[name]}; leave out one"
                raise _SurelyNotMeantError(
                    f"line {line}: the key {key.value!r} {twice}", f"line {line}: a key {twice}"
                )
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

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truths_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        parts = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else (value,)
        )
        if any(isinstance(part, bool) for part in parts):
            field = cls.model_fields[str(info.field_name)]
            if _is_for(field.annotation, (int, float)) and not _is_for(field.annotation, (bool,)):
                raise ValueError("YAML reads yes, on, no and off as true and false; write the number")
        return value


def _is_for(annotation: Any, types: tuple[type, ...]) -> bool:
    """Whether values may be of one of these types, or be one of theirs that is named."""
    if annotation is Any or annotation in types:
        return True
    if get_origin(annotation) is Literal:
        return any(type(each) in types for each in get_args(annotation))
    return any(_is_for(each, types) for each in get_args(annotation))


def nearest(word: str, known: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.5) -> str:
    """What may have been meant by a word that is not known, or `otherwise`; by default what is known.

    What is meant is alike by at least `cutoff`, as `difflib` has it.
    """
    names = [*known]
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
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
    except ValueError as error:  # as of a NUL in it
        raise refusal(f"{str(path)!r}: is no path: {error}") from None
    return parse_yaml(text, str(path), refusal, is_quoted=is_quoted)


def parse_yaml(text: str, source: str, refusal: type[Exception], *, is_quoted: bool = True) -> Any:
    """What a text holds; no keys when it is empty. Arguments as of `read_yaml`.

    Raises:
        refusal: when it is not YAML, a key is given twice, or a number is another than it looks like.
    """
    try:
        values = yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    except _SurelyNotMeantError as error:
        raise refusal(f"{source}: {error if is_quoted else error.unquoted}") from None
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
