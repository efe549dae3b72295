"""The models of a configuration, found and checked before anything starts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from deployments.calibrate.profile import profile_of
from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig
from deployments.engine_kwargs import check_engine_kwargs
from deployments.models.adapters import adapter_kwargs
from deployments.models.store import ModelStore, ResolvedModel
from slo.files.profile import Profile
from slo.predict.measured_on import Subject

_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of two kinds of numbers."""
_LONG_ROPE = frozenset({"longrope", "su"})
_UNSCALED = _LONG_ROPE | {"llama3"}
"""Kinds of position embeddings whose factor `max_position_embeddings` has in it already."""
_ORIGINAL = "original_max_position_embeddings"
"""The length before it was scaled."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One of the models, found and checked.

    Attributes:
        config: As if it were the only one.
        resolved: Where it is, and under which name.
        adapters: Engine arguments for its adapters.
    """

    config: SlackServeConfig
    resolved: ResolvedModel
    subject: Subject
    profile: Profile | None
    adapters: dict[str, Any]

    @classmethod
    def of(cls, config: SlackServeConfig) -> Self:
        """The model that a configuration names.

        Raises:
            ConfigError: It cannot be served as configured.
            ModelStoreError: It is not there.
        """
        found = ModelStore().resolve(config.model)
        subject = _subject(config, found)
        profile = None if config.profile is None else profile_of(config.profile, subject)
        found = replace(found, model_id=config.model_name or found.model_id)
        check_engine_kwargs(config)
        adapters = adapter_kwargs(config.lora.adapters, config.lora.max_rank, found.model_id)
        _check_model_fits(config, found)
        return cls(config, found, subject, profile, adapters)

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.resolved.model_id

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it and its adapters."""
        return self.name, *self.config.lora.adapters

    @property
    def longest(self) -> int | None:
        """Longest prompt plus output, tokens; None for a model that vLLM has yet to fetch."""
        return self.config.max_model_len or self.native_length

    @property
    def native_length(self) -> int | None:
        """The longest that it takes by default, tokens; None for a model that vLLM has yet to fetch."""
        return _lengths(_model_values(self.resolved)).by_default


def _subject(config: SlackServeConfig, model: ResolvedModel) -> Subject:
    """What is served, as far as the configuration says."""
    on_cpu = config.accelerator == "cpu"
    dtype = config.dtype or ("float32" if on_cpu else None)
    return Subject(
        model=model.model_id,
        accelerator="cpu" if on_cpu else None,
        tensor_parallel=config.prefill.tensor_parallel_size,
        dtype=None if dtype == "auto" else _DTYPES.get(dtype or "", dtype),
    )


def _check_model_fits(config: SlackServeConfig, model: ResolvedModel) -> None:
    """Compare a local model's own configuration with what is asked of it."""
    values = _model_values(model)
    most = _lengths(values).most
    if config.max_model_len is not None and most is not None and config.max_model_len > most:
        msg = f"max_model_len: {config.max_model_len} is more than the model's {most}"
        raise ConfigError(msg)
    heads = values.get("num_attention_heads")
    for section in ("prefill", "decode"):
        degree = getattr(config, section).tensor_parallel_size
        if heads and heads % degree:
            valid = [size for size in range(1, heads + 1) if heads % size == 0]
            nearest = min(valid, key=lambda size: abs(size - degree))
            msg = (
                f"{section}.tensor_parallel_size: {degree} does not divide the model's {heads} attention "
                f"heads; the nearest that does is {nearest}"
            )
            raise ConfigError(msg)


class _Lengths(NamedTuple):
    """Tokens of prompt and output together that a model takes; None where nobody knows.

    Attributes:
        by_default: If no `max_model_len` is given.
        most: The largest `max_model_len`.
    """

    by_default: int | None = None
    most: int | None = None


def _lengths(values: Mapping[str, Any]) -> _Lengths:
    """What vLLM makes of a model's config.json, as `_get_and_verify_max_len` of `vllm.config.model` does."""
    positions = values.get("max_position_embeddings")
    if positions is None:
        return _Lengths()
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
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
    return _Lengths(int(values.get(_ORIGINAL, most)) if is_long else most, most)


def _model_values(model: ResolvedModel) -> dict[str, Any]:
    """A local model's config.json; empty for a model that vLLM has yet to fetch."""
    path = Path(model.source) / "config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}
