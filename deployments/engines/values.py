"""Which values vLLM takes for its arguments: what a configuration gives is held against vLLM itself.

Types and ranges are those of vLLM's configuration classes, names those that vLLM and its plugins have
registered; there is no list of our own. Files and directories that are named have to be on this machine, too.
What depends on the model, on GPUs or on other arguments is left to the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from vllm.config import (
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.model_loader import LoadFormats, get_model_loader
from vllm.plugins import load_general_plugins
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from deployments.engines.parser_files import load_parsers, parser_files
from slo.files.strict_yaml import nearest

_CONFIGS: Final = (
    ModelConfig,
    LoadConfig,
    CacheConfig,
    ParallelConfig,
    SchedulerConfig,
    ObservabilityConfig,
    VllmConfig,
    FrontendArgs,
)
"""Classes whose fields are given arguments as they are; `KernelConfig` spells some of its own anew first."""
_OTHER_NAMES: Final = {"kv_cache_dtype": "cache_dtype"}
"""Fields that are called otherwise than their arguments."""
_OF_PATHS: Final = ("/", ".", "~")
"""How a path may begin, and no hub id does; vLLM looks for no home directory."""
_SIMPLE: Final = frozenset({bool, int, float, str, NoneType, torch.dtype})
_REGISTERED: Final[Mapping[str, Callable[[], Collection[str]]]] = {
    "attention_backend": lambda: ["auto", *(name.lower() for name in AttentionBackendEnum.__members__)],
    "load_format": lambda: get_args(LoadFormats),
    "quantization": lambda: QUANTIZATION_METHODS,
    "reasoning_parser": ReasoningParserManager.list_registered,
    "tool_call_parser": ToolParserManager.list_registered,
}
"""Arguments that name something that plugins can add to, and what there is."""
_PARSERS: Final = frozenset({"reasoning_parser", "tool_call_parser"})
"""Those whose names count as they are written, and that files of an operator's own may register."""


class _Field(NamedTuple):
    """What a value may be: the type of vLLM's, and the names that are a part of it."""

    type: TypeAdapter[Any]
    names: tuple[str, ...]


def refusal(given: Mapping[str, Any]) -> str | None:
    """What is wrong with the first value that vLLM would not take, if there is one.

    Args:
        given: Values by the names of vLLM's arguments; None leaves one to vLLM.
    """
    if (problem := _not_here(given)) is not None:
        return problem
    for key, value in given.items():
        if value is not None and (problem := _not_of_its_type(key, value) or _not_there(key, value, given)):
            return problem
    if given.get("enable_auto_tool_choice") and not given.get("tool_call_parser"):
        return (
            "enable_auto_tool_choice needs a tool_call_parser, which finds the calls in what the model writes"
        )
    return None


def _not_here(given: Mapping[str, Any]) -> str | None:
    """What is wrong with the first file or directory that is not on this machine, as far as one is named."""
    for key, path in parser_files(given).items():
        if not Path(path).is_file():
            return f"{key}: there is no file {path}"
    speculation = given.get("speculative_config")
    draft = speculation.get("model") if isinstance(speculation, Mapping) else None
    if isinstance(draft, str) and draft.startswith(_OF_PATHS) and not Path(draft).exists():
        return f"speculative_config: there is no directory {draft}; give one, written out, or a hub id"
    if (template := given.get("chat_template")) is not None:
        try:
            load_chat_template(str(template))
        except ValueError as error:
            return f"chat_template: {error}"
    return None


def _not_of_its_type(key: str, value: Any) -> str | None:
    field = _field(key)
    if field is None:
        return None
    try:
        field.type.validate_python(value)
    except ValidationError as error:
        if isinstance(value, str) and field.names:
            return f"vLLM has no {key} {value!r}; {nearest(value, field.names)}"
        return f"{key}: {error.errors()[0]['msg']} (given: {value!r})"
    return None


@cache
def _field(key: str) -> _Field | None:
    """The field that is given an argument; None where vLLM may make something else of the value before."""
    name = _OTHER_NAMES.get(key, key)
    fields = (each.__pydantic_fields__[name] for each in _CONFIGS if name in each.__pydantic_fields__)
    if (field := next(fields, None)) is None:
        return None
    parts = [*_parts(field.annotation)]
    if not all(part in _SIMPLE or get_origin(part) is Literal for part in parts):
        return None
    takes: TypeAdapter[Any] = TypeAdapter(
        field.rebuild_annotation(), config=ConfigDict(arbitrary_types_allowed=True)
    )
    return _Field(takes, tuple(name for part in parts for name in get_args(part)))


def _parts(annotation: Any) -> Iterator[Any]:
    """The types of which a value may have any."""
    if get_origin(annotation) not in (Union, UnionType):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _parts(part)


def _not_there(key: str, value: Any, given: Mapping[str, Any]) -> str | None:
    """What is wrong with a name that neither vLLM, one of its plugins nor a given file has registered."""
    if (names := _REGISTERED.get(key)) is None or not isinstance(value, str) or not value:
        return None
    if key == "tool_call_parser" and not given.get("enable_auto_tool_choice"):
        return None  # nobody asks for it
    name = value if key in _PARSERS else value.lower()
    if name not in names():
        load_general_plugins()  # as each of vLLM's processes does first
        load_parsers(given)
    if name in names() or (key == "load_format" and _has_loader(name)):
        return None
    return f"vLLM has no {key} {value!r}; {nearest(name, names())}"


def _has_loader(load_format: str) -> bool:
    """Whether a plugin has registered a loader of weights under this name."""
    try:
        get_model_loader(LoadConfig(load_format=load_format))
    except ValueError:
        return False
    return True
