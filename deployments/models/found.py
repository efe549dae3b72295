"""The models of a configuration, found and checked before anything starts."""

from dataclasses import dataclass, replace
from typing import Any, Self

from deployments.calibrate.profile import profile_of
from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig
from deployments.engines.arguments import check_engine_kwargs, of_sampling, of_the_model
from deployments.models.adapters import adapter_kwargs
from deployments.models.fit import check_fits
from deployments.models.store import ModelStore, ResolvedModel
from deployments.models.text_model import (
    lengths,
    max_output_tokens,
    sampled_with,
    text_model,
    with_most_output_tokens,
)
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
        sampling: Engine arguments of both tiers that shape it and how it samples.
        sampled_with: What it says of the `temperature`, `top_p` and `max_tokens` of answers whose requests do
            not.
        max_output_tokens: The most tokens of an answer, whatever its request names; None for what it takes.
    """

    config: SlackServeConfig
    resolved: ResolvedModel
    subject: Subject
    profile: Profile | None
    adapters: dict[str, Any]
    sampling: dict[str, Any]
    sampled_with: dict[str, float]
    max_output_tokens: int | None

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
        values = text_model(found.source, of_the_model(config))
        check_fits(config, values)
        _check_whole_prompts_fit(config, config.max_model_len or lengths(values).by_default)
        sampling = with_most_output_tokens(found.source, of_sampling(config), config.limits.max_output_tokens)
        return cls(
            config,
            found,
            subject,
            profile,
            adapters,
            sampling,
            sampled_with(found.source, sampling),
            max_output_tokens(found.source, sampling),
        )

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
