"""Whether a model can be served as configured, as far as its own files and the configuration say.

Needs neither Ray nor vLLM, which take seconds to import, so that `slackserve serve` knows it before it starts
anything. What only vLLM knows is checked where the application is built.
"""

from collections.abc import Mapping
from typing import Any

from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig
from deployments.models.adapters import find_adapters
from deployments.models.store import ResolvedModel
from deployments.models.text_model import SHAPED_BY, lengths, text_model


def check_ahead(config: SlackServeConfig, models: Mapping[str, ResolvedModel]) -> None:
    """Refuse what can be told before anything starts.

    Args:
        config: What is to be deployed.
        models: By what stands before a section's keys (`SlackServeConfig.by_section`), where its model is.

    Raises:
        ConfigError: when a model cannot be served as configured, an adapter is not there, or an API key
            cannot be read.
    """
    config.key_source().ring()
    for section, each in config.by_section().items():
        try:
            _check_one(each, models[section])
        except ConfigError as error:
            raise ConfigError(f"{section.removesuffix('.')}: {error}" if section else str(error)) from None


def _check_one(config: SlackServeConfig, model: ResolvedModel) -> None:
    values = text_model(model.source, {})
    find_adapters(config.lora.adapters, config.lora.max_rank, config.model_name or model.model_id)
    given = config.prefill.engine_kwargs | config.decode.engine_kwargs
    if given.keys().isdisjoint(SHAPED_BY):
        check_fits(config, values)


def check_fits(config: SlackServeConfig, values: Mapping[str, Any]) -> None:
    """Compare what a model's own configuration says (`text_model`) with what is asked of it.

    Raises:
        ConfigError: It is a draft model that names the one to serve, takes no prompts of that length, or
            cannot be divided among so many workers.
    """
    if values.get("speculators_config") is not None:
        msg = (
            "model: it is a draft model in the format of speculators, in whose place vLLM would serve the "
            "one that it drafts for (verifier in its config.json): give that one here, and this one as model "
            "in a speculative_config of both tiers"
        )
        raise ConfigError(msg)
    most = lengths(values).most
    if config.max_model_len is not None and most is not None and config.max_model_len > most:
        msg = f"max_model_len: {config.max_model_len} is more than the model's {most}"
        raise ConfigError(msg)
    _check_degrees(config, values)


def degrees_apart(config: SlackServeConfig, values: Mapping[str, Any]) -> tuple[int, int] | None:
    """The tensor parallel degrees, prefill's first, unless KV moves between replicas with them and all such.

    Of two powers of two one is a multiple of the other, and up to the number of KV heads no two workers have
    copies of one.
    """
    degrees = config.prefill.tensor_parallel_size, config.decode.tensor_parallel_size
    _, kv_heads = _heads(values)
    fits_others = all(degree.bit_count() == 1 and degree <= (kv_heads or 1) for degree in degrees)
    return None if fits_others else degrees


def _heads(values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Attention and KV heads that are divided among workers; None where the model does not say."""
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if not isinstance(heads, int) or heads < 1:
        return None, None
    if not isinstance(kv_heads, int) or kv_heads < 1 or values.get("kv_lora_rank") is not None:
        return heads, heads
    return heads, kv_heads


def _check_degrees(config: SlackServeConfig, values: Mapping[str, Any]) -> None:
    """Compare the tensor parallel degrees with the model's heads, as vLLM's `QKVParallelLinear` does.

    KV heads are divided among the workers, or each has so many copies, which NIXL's handshakes refuse where
    decode has fewer workers than prefill. With MLA there are none to divide.
    """
    heads, kv_heads = _heads(values)
    if heads is None or kv_heads is None:
        return
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
