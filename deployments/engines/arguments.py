"""What vLLM's engines are started with: ours, and what a configuration adds for one of the tiers.

Owns which arguments a configuration may add. Adapters' are `deployments.models.adapters`'s.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Final

from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from decode_node.carrying import ASYNC_SCHEDULER, PRESSURE_SCHEDULER, SCHEDULER, WORKERS
from decode_node.engine.setup import DecodeSetup, weights_of
from decode_node.grammars.child import CHECKED
from deployments.config import ConfigError
from deployments.config.replicas import PoolConfig
from deployments.config.settings import SlackServeConfig
from deployments.engines.speculation import refuse_unlike_drafters
from deployments.engines.values import refusal
from kv_transfer.connector import KVRole, kv_transfer_config
from prefill_node import engine_setup
from slo.preemption.types import PreemptionMode
from slo.queue.batching import STEP_TOKENS

_GPU_MEMORY: Final = 0.9
"""Part of its share of a GPU that a worker uses; the rest is for what its process takes beside it."""
_PREFILL_WORKERS: Final = {
    "cpu": "prefill_node.worker.cpu.PreemptibleCPUWorker",
    "cuda": "prefill_node.worker.cuda.PreemptibleGPUWorker",
}
_OF_ANSWERS: Final = frozenset(
    {
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "enable_force_include_usage",
        "enable_prompt_tokens_details",
        "exclude_tools_when_tool_choice_none",
        "response_role",
        "return_tokens_as_token_ids",
        "tool_call_parser",
        "tool_parser_plugin",
    }
)
"""Arguments of vLLM's server that shape prompts and answers, both of which are decode's."""
_OF_SAMPLING: Final = (
    "generation_config",
    "logits_processors",
    "logprobs_mode",
    "max_logprobs",
    "override_generation_config",
    "use_fp64_gumbel",
)
"""Arguments that shape sampling: what is given to one tier holds for both."""
_OF_THE_MODEL: Final = (
    "attention_backend",
    "block_size",
    "code_revision",
    "config_format",
    "disable_hybrid_kv_cache_manager",
    "disable_sliding_window",
    "hf_config_path",
    "hf_overrides",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "lora_dtype",
    "lora_target_modules",
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "model_class_overrides",
    "model_weights",
    "quantization",
    "quantization_config",
    "revision",
    "tokenizer_mode",
    "tokenizer_revision",
)
"""Arguments that shape weights, positions, tokens, or how KV blocks lie: likewise.

NIXL's handshake compares dtypes, backends and sizes, and every pull fails where they differ; of the others it
knows nothing, and decode would go on from another model's KV cache.
"""
_KV_MEMORY: Final = ("gpu_memory_utilization", "kv_cache_memory_bytes")
"""What vLLM takes from the environment on CPU, where `kv_cache_gib` sets it."""
_MADE_UP: Final = "dummy"
"""The one `load_format` that gives other weights than are there."""


def check_engine_kwargs(config: SlackServeConfig) -> None:
    """Refuse what a configuration must not add.

    Raises:
        ConfigError: vLLM has no such argument, or not for this tier, or takes no such value of it, or both
            tiers would sample otherwise, or would not have the same model and KV cache.
    """
    known = [*(field.name for field in dataclasses.fields(AsyncEngineArgs)), *_OF_ANSWERS]
    for section in ("prefill", "decode"):
        for key in getattr(config, section).engine_kwargs:
            if key in _OF_ANSWERS and section == "prefill":
                msg = f"prefill.engine_kwargs: {key!r} is about prompts and answers; give it to decode alone"
                raise ConfigError(msg)
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "see vLLM's engine arguments"
                msg = f"{section}.engine_kwargs: vLLM has no engine argument {key!r}; {hint}"
                raise ConfigError(msg)
        if (problem := refusal(getattr(config, section).engine_kwargs)) is not None:
            raise ConfigError(f"{section}.engine_kwargs: {problem}")
        for key in _KV_MEMORY if config.accelerator == "cpu" else ():
            if key in getattr(config, section).engine_kwargs:
                raise ConfigError(f"{section}.engine_kwargs: {key!r} has no effect on cpu; use kv_cache_gib")
    if (problem := refusal({"dtype": config.dtype})) is not None:
        raise ConfigError(f"dtype: {problem}")
    _refuse_differences(config.prefill.engine_kwargs, config.decode.engine_kwargs)


def _refuse_differences(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> None:
    for keys, why in (
        (_OF_SAMPLING, "both sample tokens of each answer"),
        (_OF_THE_MODEL, "decode goes on from the KV cache that prefill computes"),
    ):
        for key in keys:
            if key in prefill and key in decode and prefill[key] != decode[key]:
                msg = (
                    f"prefill.engine_kwargs and decode.engine_kwargs differ in {key!r}, {prefill[key]} and "
                    f"{decode[key]}; {why}, so give it once, for both"
                )
                raise ConfigError(msg)
    formats = [each.get("load_format", "auto") for each in (prefill, decode)]
    if formats.count(_MADE_UP) == 1:
        msg = (
            f"prefill.engine_kwargs and decode.engine_kwargs: load_format is {formats[0]!r} and "
            f"{formats[1]!r}; {_MADE_UP!r} makes weights up, so give it to both or to none"
        )
        raise ConfigError(msg)
    refuse_unlike_drafters(prefill, decode)


def engine_kwargs(
    config: SlackServeConfig, longest: int | None, pool: PoolConfig, role: KVRole
) -> dict[str, Any]:
    """What one tier's engines start with, but for what holds for both tiers (`FoundModel.sampling`).

    Of two values the later counts: ours, the tier's, and the configuration's own. `longest` is what the model
    takes, tokens, where that is known.
    """
    buffer_device, longest = config.kv_transfer.buffer_device, config.max_model_len or longest
    kwargs: dict[str, Any] = {
        "tensor_parallel_size": pool.tensor_parallel_size,
        "async_scheduling": False,
        "kv_transfer_config": kv_transfer_config(
            role,
            config.accelerator if buffer_device == "auto" else buffer_device,
            config.kv_transfer.lease_s,
            swap_bytes=config.pressure.swap_bytes(config.accelerator) if role is KVRole.DECODE else 0,
        ),
    }
    if (traces := config.tracing.options()) is not None:
        kwargs["otlp_traces_endpoint"] = traces.endpoint
    if config.max_model_len is not None:
        kwargs["max_model_len"] = config.max_model_len
    if config.accelerator == "cpu":
        kwargs |= {"enforce_eager": True, "dtype": "float32"}
    if config.dtype is not None:
        kwargs["dtype"] = config.dtype
    if pool.gpus_per_worker < 1:
        kwargs["gpu_memory_utilization"] = round(_GPU_MEMORY * pool.gpus_per_worker, 3)
    of_tier = _decode_kwargs if role is KVRole.DECODE else _prefill_kwargs
    kwargs |= of_tier(config, longest, pool)
    kwargs |= pool.engine_kwargs
    if role is KVRole.DECODE:
        kwargs["structured_outputs_config"] = _grammars(pool)
        if config.pressure.enabled:
            given = kwargs.get("additional_config") or {}
            setup = DecodeSetup(weights_of(config.tiers.tier_set()), config.pressure.drop_after_s)
            kwargs["additional_config"] = {**given, **setup.encode()}
    return kwargs


def _decode_kwargs(config: SlackServeConfig, longest: int | None, pool: PoolConfig) -> dict[str, Any]:
    scheduler = PRESSURE_SCHEDULER if config.pressure.enabled else SCHEDULER
    is_ahead = _is_a_step_ahead(config, pool)
    chunk = config.degraded.chunk_tokens or (128 if config.accelerator == "cpu" else 512)
    return {
        "scheduler_cls": ASYNC_SCHEDULER if is_ahead else scheduler,
        "async_scheduling": is_ahead,
        "worker_cls": WORKERS[config.accelerator],
        "long_prefill_token_threshold": min(chunk, longest or chunk),
    }


def _grammars(pool: PoolConfig) -> StructuredOutputsConfig:
    """How grammars are kept to. By itself vLLM takes for all what the first request with one needs.

    Raises:
        ConfigError: What is configured is not vLLM's, or compiles what nobody can have compiled before.
    """
    given = pool.engine_kwargs.get("structured_outputs_config") or {}
    field = "decode.engine_kwargs: structured_outputs_config"
    default, *others = CHECKED
    try:
        grammars = StructuredOutputsConfig(**{"backend": default, **given})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}: {error}") from None
    if grammars.backend not in CHECKED:
        msg = (
            f"{field}: backend: {grammars.backend!r} compiles grammars that are not held against "
            f"limits.grammar_timeout_s and limits.max_grammar_mib before; set it to {default!r}, the "
            f"default, or to {' or '.join(map(repr, others))}"
        )
        raise ConfigError(msg)
    return grammars


def _is_a_step_ahead(config: SlackServeConfig, pool: PoolConfig) -> bool:
    """Whether decode composes a step while the one before it runs: what vLLM itself does on a GPU."""
    return (
        config.accelerator == "cuda"
        and not config.pressure.enabled
        and pool.engine_kwargs.get("speculative_config") is None
        and pool.engine_kwargs.get("async_scheduling", True)
    )


def stock_prefill(config: SlackServeConfig) -> dict[str, Any]:
    """What makes prefill run as vLLM does by itself, where it cannot be stopped.

    On a CPU it stays eager, as decode does: compiling is C++ compilation within the first requests there.
    """
    is_eager = config.prefill.engine_kwargs.get("enforce_eager", config.accelerator == "cpu")
    return {"async_scheduling": None, "enforce_eager": is_eager}


def _prefill_kwargs(config: SlackServeConfig, longest: int | None, pool: PoolConfig) -> dict[str, Any]:
    kwargs: dict[str, Any] = {
        "scheduler_cls": engine_setup.SCHEDULER,
        "worker_cls": _PREFILL_WORKERS[config.accelerator],
    }
    if config.preemption.mode is PreemptionMode.OFF:
        kwargs |= stock_prefill(config)
    else:
        kwargs["enforce_eager"] = not config.preemption.compiled
    given = pool.engine_kwargs
    if given.get("enable_chunked_prefill") is not False:  # else a step takes the longest prompt whole
        tokens = min(longest or STEP_TOKENS, STEP_TOKENS)
        kwargs["max_num_batched_tokens"] = max(tokens, given.get("max_num_seqs") or 0)
    return kwargs


def of_the_model(config: SlackServeConfig) -> dict[str, Any]:
    """What is configured of arguments that shape the model, for both tiers."""
    return _of_both(config, _OF_THE_MODEL)


def alike_in_both(config: SlackServeConfig) -> dict[str, Any]:
    """What is configured of all arguments in which two tiers, or two replicas of one, must not differ."""
    alike = of_sampling(config)
    is_made_up = config.prefill.engine_kwargs.get("load_format") == _MADE_UP
    return {**alike, "load_format": _MADE_UP} if is_made_up else alike


def of_sampling(config: SlackServeConfig) -> dict[str, Any]:
    """What is configured of arguments that shape the model and how it samples, for both tiers."""
    return _of_both(config, _OF_SAMPLING + _OF_THE_MODEL)


def _of_both(config: SlackServeConfig, keys: tuple[str, ...]) -> dict[str, Any]:
    """What either tier is given of arguments that hold for both."""
    given = config.prefill.engine_kwargs | config.decode.engine_kwargs
    return {key: given[key] for key in keys if key in given}
