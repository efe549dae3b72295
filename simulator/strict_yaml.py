"""YAML files that are read strictly: an unknown key is refused with the nearest valid one."""

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator


class FleetConfigError(Exception):
    """A file that cannot be used; the message names the key and what would be right."""


class Section(BaseModel):
    """A part of a file: unknown keys are refused, with the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}; {nearest(str(key), cls.model_fields)}")
        return values


def nearest(word: str, known: Iterable[str]) -> str:
    """What may have been meant by a word that is not known."""
    names = [*known]
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"


def known_name(what: str, value: Any, known: Collection[str]) -> Any:
    """A name that must be known; what is not a name is left to be checked elsewhere."""
    if isinstance(value, str) and value not in known:
        raise ValueError(f"there is no {what} {value!r}; {nearest(value, known)}")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a file.

    Raises:
        FleetConfigError: when it cannot be read, is not YAML or is something else than keys and values.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise FleetConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FleetConfigError(f"{path}: is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise FleetConfigError(f"{path}: expected keys and values, found {type(values).__name__}")
    return values


def explain(error: ValidationError, source: str) -> str:
    """All of a validation error's complaints, one a line, each with its key."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "top level"
        given = item.get("input")
        shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
        lines.append(f"{source}: {key}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return "\n".join(lines)
