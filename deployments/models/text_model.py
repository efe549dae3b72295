"""What a model's own configuration says of it, as vLLM will read it.

Owns how long prompt and answer may be by it, and how answers are sampled. Of models that are not here
yet, and of what vLLM knows and their files do not say, it says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from deployments.config import ConfigError
from deployments.models.store import HF_CONFIG, MISTRAL_CONFIG

_LONG_ROPE = frozenset({"longrope", "su"})
_UNSCALED = _LONG_ROPE | {"llama3"}
"""Kinds of position embeddings whose factor `max_position_embeddings` has in it already."""
_ORIGINAL = "original_max_position_embeddings"
"""The length before it was scaled."""
_ROPE = "rope_parameters"
_OLDER_ROPE = "rope_scaling"
_POSITIONS = "max_position_embeddings"
SHAPED_BY = ("config_format", "disable_sliding_window", "hf_config_path", "hf_overrides")
"""vLLM's arguments with which a model is read otherwise."""
_OTHER_LENGTHS = ("n_positions", "max_seq_len", "seq_length", "max_target_positions", "max_sequence_length")
"""Lengths that may stand beside it; the smallest counts."""

_GENERATION_CONFIG = "generation_config.json"
_OF_THE_MODEL, _NONE = "auto", "vllm"
"""What `generation_config` may be, vLLM's argument, beside a directory: its default, and no file."""
_SAMPLED_WITH = {"temperature": "temperature", "top_p": "top_p", "max_new_tokens": "max_tokens"}
"""What is told of how answers are sampled, and what vLLM calls it."""

_ENDLESS = 1e100
"""No number that is meant is as large."""
_CONFIGURATION = "its configuration or engine_kwargs.hf_overrides"


class Lengths(NamedTuple):
    """Tokens of prompt and output together that a model takes; None where nobody knows.

    Attributes:
        by_default: If no `max_model_len` is given.
        most: The largest `max_model_len`.
    """

    by_default: int | None = None
    most: int | None = None


def lengths(values: Mapping[str, Any]) -> Lengths:
    """What vLLM makes of a model's config.json, as `_get_and_verify_max_len` of `vllm.config.model` does.

    Raises:
        ConfigError: What stands for a length, or scales it, is none.
    """
    positions = _number(values, _POSITIONS)
    if positions is None:
        return Lengths()
    others = (_number(values, key) for key in _OTHER_LENGTHS)
    positions = min([positions, *(each for each in others if each is not None)])
    positions = _number(values, "model_max_length") or positions
    rope = _of_kind(dict, values, _ROPE) or {}
    is_of_layers = bool(rope) and all(isinstance(each, dict) for each in rope.values())
    of_layers = [*rope.values()] if is_of_layers else [rope]
    kinds = [_rope_type(each) for each in of_layers]
    factor = 1.0
    for kind, each in zip(kinds, of_layers, strict=True):
        if kind not in _UNSCALED:
            factor = _number(each, "factor", _ROPE) or factor
        if kind == "yarn":
            positions = _number(values, _ORIGINAL) or _number(each, _ORIGINAL, _ROPE) or positions
    # What such models state is scaled already.
    is_scaled = "gemma3" in (_of_kind(str, values, "model_type") or "")
    most = int(positions if is_scaled else positions * factor)
    is_long = not _LONG_ROPE.isdisjoint(kinds)
    by_default = int((_number(values, _ORIGINAL) if is_long else None) or most)
    if min(most, by_default) < 1:
        msg = f"model: it takes no prompt by {_CONFIGURATION}: its length is {positions}, times {factor}"
        raise ConfigError(msg)
    return Lengths(by_default, most)


def _number(values: Mapping[str, Any], key: str, part: str | None = None) -> float | None:
    """What is given for `key`; None if nothing is.

    Raises:
        ConfigError: It is no number above 0.
    """
    value = values.get(key)
    if value is None:
        return None
    if type(value) not in {int, float} or not 0 < value < _ENDLESS:
        raise _refusal(value, key, part, "a number above 0, without quotes")
    return cast("float", value)


def _rope_type(rope: Mapping[str, Any]) -> str | None:
    """Of one kind of layers, under the newer or the older name."""
    newer, older = (_of_kind(str, rope, key, _ROPE) for key in ("rope_type", "type"))
    return cast("str | None", newer or older)


def _of_kind(kind: type, values: Mapping[str, Any], key: str, part: str | None = None) -> Any:
    """The same of what is no number."""
    value = values.get(key)
    if value is not None and not isinstance(value, kind):
        raise _refusal(value, key, part, "a name" if kind is str else "keys and values")
    return value


def _refusal(value: Any, key: str, part: str | None, right: str) -> ConfigError:
    name = f"{key} of its {part}" if part else key
    name = name.replace(_ROPE, f"{_ROPE} ({_OLDER_ROPE})")
    return ConfigError(f"model: {name} is {value!r} in {_CONFIGURATION}; give {right}")


def text_model(source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's own configuration says of the part of it that reads and writes text, as vLLM reads it.

    What only vLLM knows is not there: of a model that it has yet to fetch nothing is.

    Args:
        source: Its directory or hub id.
        given: vLLM's arguments that shape it.

    Raises:
        ConfigError: It cannot be read.
    """
    directory = Path(given.get("hf_config_path") or source)
    if _is_mistrals(directory, given.get("config_format", "auto")):
        return _of_mistral(_json(directory / MISTRAL_CONFIG))
    path = directory / HF_CONFIG
    if not path.is_file():
        return {}
    values = _overridden(_with_one_rope(_json(path)), _with_one_rope(given.get("hf_overrides") or {}))
    if given.get("disable_sliding_window"):
        values.pop(_POSITIONS, None)  # the window may be the length then
    text = values.get("text_config")
    return text if isinstance(text, dict) else values


def sampled_with(source: str, given: Mapping[str, Any]) -> dict[str, float]:
    """What of an answer's `temperature`, `top_p` and `max_tokens` a model says, for requests that do not.

    Args:
        source: Its directory or hub id.
        given: vLLM's arguments that shape it, and how it samples.
    """
    where = given.get("generation_config", _OF_THE_MODEL)
    if where == _OF_THE_MODEL:
        where = given.get("hf_config_path") or source
    path = Path(where) / _GENERATION_CONFIG
    values = _json(path) if where != _NONE and path.is_file() else {}
    values |= given.get("override_generation_config") or {}
    return {its: values[name] for name, its in _SAMPLED_WITH.items() if values.get(name) is not None}


def max_output_tokens(source: str, given: Mapping[str, Any]) -> int | None:
    """The most tokens of an answer, whatever its request names; None for what the model takes.

    What its own files say holds only for requests that name none; what an operator gives in their place, for
    all, as in vLLM's server.

    Args:
        source: As of `sampled_with`.
        given: Likewise.
    """
    where = given.get("generation_config", _OF_THE_MODEL)
    instead = {**given, "generation_config": _NONE if where == _OF_THE_MODEL else where}
    return cast("int | None", sampled_with(source, instead).get("max_tokens"))


def with_most_output_tokens(source: str, given: Mapping[str, Any], most: int | None) -> dict[str, Any]:
    """The same arguments, with which an answer whose request names no `max_tokens` has no more than `most`.

    Fewer that the model or an operator says stay. Requests that name more are refused before.

    Args:
        source: As of `sampled_with`.
        given: Likewise.
        most: None for what the model takes.
    """
    unnamed = sampled_with(source, given).get("max_tokens")
    if most is None or (isinstance(unnamed, int) and unnamed <= most):
        return {**given}
    overrides = given.get("override_generation_config") or {}
    return {**given, "override_generation_config": {**overrides, "max_new_tokens": most}}


def _is_mistrals(directory: Path, config_format: str) -> bool:
    """Whether vLLM reads a directory in Mistral's own format."""
    if config_format != "auto":
        return config_format == "mistral"
    return (directory / MISTRAL_CONFIG).is_file() and any(directory.glob("consolidated*.safetensors"))


def _of_mistral(params: Mapping[str, Any]) -> dict[str, Any]:
    """What a params.json says, by the names of a config.json; no length where it is scaled."""
    names = {
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "kv_lora_rank": "kv_lora_rank",
    }
    if not params.get("yarn"):
        names[_POSITIONS] = _POSITIONS
    return {name: params[its] for name, its in names.items() if params.get(its) is not None}


def _with_one_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the older of two names for one thing replaced, in its text model too."""
    named = dict(values)
    if _OLDER_ROPE in named:
        older = named.pop(_OLDER_ROPE)
        named[_ROPE] = older or named.get(_ROPE)
    if isinstance(text := named.get("text_config"), dict):
        named["text_config"] = _with_one_rope(text)
    return named


def _overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """With vLLM's `hf_overrides`: a mapping replaces another, but for the text model's, which takes it up."""
    changed = dict(values) | dict(overrides)
    for each in (values, overrides):
        if not isinstance(each.get("text_config"), dict):
            return changed
    return changed | {"text_config": _merged(values["text_config"], overrides["text_config"])}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _json(path: Path) -> dict[str, Any]:
    """A model's own configuration.

    Raises:
        ConfigError: It cannot be read, or is none.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} cannot be read ({error}); is it whole?") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model: {path} holds no keys and values; give a model's own directory")
    return values
