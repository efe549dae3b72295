"""The models of a configuration, found and checked before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from deployments.calibrate.profile import profile_of
from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig
from deployments.engine_kwargs import check_engine_kwargs, of_the_model
from deployments.models.adapters import adapter_kwargs
from deployments.models.store import ModelStore, ResolvedModel
from deployments.models.text_model import lengths, text_model
from deployments.ray_names import check_ray_names
from slo.files.profile import Profile
from slo.predict.measured_on import Subject

_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of two kinds of numbers."""


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
        check_ray_names(config)
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
        """Longest prompt plus output, tokens; None where only vLLM will know it."""
        return self.config.max_model_len or self.native_length

    @property
    def native_length(self) -> int | None:
        """The longest that it takes by default, tokens; None where only vLLM will know it."""
        return lengths(text_model(self.resolved.source, of_the_model(self.config))).by_default


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


def _check_whole_prompts_fit(config: SlackServeConfig, longest: int | None) -> None:
    """Compare what a step takes with the model's length, where prompts are not cut into chunks."""
    for section in ("prefill", "decode"):
        given = getattr(config, section).engine_kwargs
        tokens = given.get("max_num_batched_tokens")
        if None in (tokens, longest) or given.get("enable_chunked_prefill") is not False or tokens >= longest:
            continue
        msg = (
            f"{section}.engine_kwargs: max_num_batched_tokens ({tokens}) is less than the {longest} tokens "
            "that a prompt may have, which enable_chunked_prefill: false leaves whole; leave out one"
        )
        raise ConfigError(msg)


def _check_model_fits(config: SlackServeConfig, model: ResolvedModel) -> None:
    """Compare a local model's own configuration with what is asked of it."""
    values = text_model(model.source, of_the_model(config))
    most = lengths(values).most
    if config.max_model_len is not None and most is not None and config.max_model_len > most:
        msg = f"max_model_len: {config.max_model_len} is more than the model's {most}"
        raise ConfigError(msg)
    _check_whole_prompts_fit(config, config.max_model_len or lengths(values).by_default)
    _check_degrees(config, values)


def _check_degrees(config: SlackServeConfig, values: Mapping[str, Any]) -> None:
    """Compare the tensor parallel degrees with the model's heads, as vLLM's `QKVParallelLinear` does.

    KV heads are divided among the workers, or each has so many copies, which NIXL's handshakes refuse where
    decode has fewer workers than prefill. With MLA there are none to divide.
    """
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if not isinstance(heads, int) or heads < 1:
        return
    if not isinstance(kv_heads, int) or kv_heads < 1 or values.get("kv_lora_rank") is not None:
        kv_heads = heads
    valid = [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    for section in ("prefill", "decode"):
        degree = getattr(config, section).tensor_parallel_size
        if degree in valid:
            continue
        nearest = min(valid, key=lambda size: abs(size - degree))
        why = (
            f"does not divide the model's {heads} attention heads"
            if heads % degree
            else f"neither divides the model's {kv_heads} KV heads nor is a multiple of them"
        )
        msg = f"{section}.tensor_parallel_size: {degree} {why}; the nearest that can work is {nearest}"
        raise ConfigError(msg)
    prefill, decode = config.prefill.tensor_parallel_size, config.decode.tensor_parallel_size
    if prefill > max(decode, kv_heads):
        msg = (
            f"prefill.tensor_parallel_size ({prefill}) is more than decode.tensor_parallel_size ({decode}) "
            f"and than the model's {kv_heads} KV heads, of which several workers would have copies that "
            "vLLM's NIXL connector does not pull; give both tiers the same, or prefill at most "
            f"{kv_heads}"
        )
        raise ConfigError(msg)
