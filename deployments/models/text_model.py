"""What a model's own configuration says of it, as vLLM will read it.

Owns how long prompt and answer may be by it. Of models that are not here yet, and of what vLLM knows and
their files do not say, it says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deployments.config import ConfigError
from deployments.models.store import HF_CONFIG, MISTRAL_CONFIG

_LONG_ROPE = frozenset({"longrope", "su"})
_UNSCALED = _LONG_ROPE | {"llama3"}
"""Kinds of position embeddings whose factor `max_position_embeddings` has in it already."""
_ORIGINAL = "original_max_position_embeddings"
"""The length before it was scaled."""
_ROPE = "rope_parameters"
_POSITIONS = "max_position_embeddings"
SHAPED_BY = ("config_format", "disable_sliding_window", "hf_config_path", "hf_overrides")
"""vLLM's arguments with which a model is read otherwise."""
_OTHER_LENGTHS = ("n_positions", "max_seq_len", "seq_length", "max_target_positions", "max_sequence_length")
"""Lengths that may stand beside it; the smallest counts."""


class Lengths(NamedTuple):
    """Tokens of prompt and output together that a model takes; None where nobody knows.

    Attributes:
        by_default: If no `max_model_len` is given.
        most: The largest `max_model_len`.
    """

    by_default: int | None = None
    most: int | None = None


def lengths(values: Mapping[str, Any]) -> Lengths:
    """What vLLM makes of a model's config.json, as `_get_and_verify_max_len` of `vllm.config.model` does."""
    positions = values.get(_POSITIONS)
    if positions is None:
        return Lengths()
    positions = min([positions, *(values[key] for key in _OTHER_LENGTHS if values.get(key) is not None)])
    positions = values.get("model_max_length") or positions
    rope = values.get(_ROPE) or {}
    is_of_layers = bool(rope) and all(isinstance(each, dict) for each in rope.values())
    of_layers = [*rope.values()] if is_of_layers else [rope]
    kinds = [each.get("rope_type") or each.get("type") for each in of_layers]
    factor = 1.0
    for kind, each in zip(kinds, of_layers, strict=True):
        if kind not in _UNSCALED:
            factor = each.get("factor") or factor
        if kind == "yarn":
            positions = values.get(_ORIGINAL) or each.get(_ORIGINAL) or positions
    # What such models state is scaled already.
    most = int(positions if "gemma3" in values.get("model_type", "") else positions * factor)
    is_long = not _LONG_ROPE.isdisjoint(kinds)
    return Lengths(int(values.get(_ORIGINAL, most)) if is_long else most, most)


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
    if "rope_scaling" in named:
        older = named.pop("rope_scaling")
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
