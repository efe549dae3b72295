"""Both tiers of replicas of one model, as Ray Serve is told of them.

Owns what a replica is started with: its engine, its node, its number, hardware and environment.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig, build_llm_deployment
from ray.serve.schema import LoggingConfig

from decode_node.grammars.check import GrammarLimits
from decode_node.server import DecodeNodeConfig, DecodeServer
from deployments.autoscaling import TierAutoscaler
from deployments.config.replicas import PoolConfig
from deployments.config.settings import SlackServeConfig
from deployments.engines.arguments import engine_kwargs, stock_prefill
from deployments.engines.cpu_plan import CorePlan
from deployments.engines.environment import cpu_environment
from deployments.engines.parser_files import ConfigWithParsers
from deployments.models.digest import model_digest
from deployments.models.found import FoundModel
from deployments.names import DECODE_PREFIX, PREFILL_PREFIX
from engine_host.shared_gpu import GPU_PER_WORKER
from kv_transfer.connector import KVRole
from kv_transfer.side_channel import PORT_BASE
from prefill_node.engine_setup import EngineSetup, shares_of
from prefill_node.replica.server import PrefillNodeConfig, PrefillServer
from router.serve.replica_pinning import PinnedDecode, PinnedPrefill
from slo.model_digest import ModelDigest
from slo.predict.measured_on import UNKNOWN
from slo.replacement import ReplacementRules
from telemetry.reporting.monitor_names import running_code

NO_LIMIT: Final = 100_000
"""Of calls that Serve lets a replica have at once."""
_HEALTH_CHECK_S: Final = 2.0
_IMAGE_PIXELS: Final = "VLLM_MAX_IMAGE_PIXELS"
"""What an operator has set it to himself holds, instead of `limits.max_image_pixels`."""
_OFFLINE: Final = "HF_HUB_OFFLINE"
"""Likewise, instead of what the model needs."""
_NO_PLACES: Final = (None, "auto", "vllm")
"""What else may be given of a `generation_config`, among what names directories and Hugging Face ids."""


def replicas(model: FoundModel, cores: CorePlan, router: DeploymentHandle) -> serve.Application:
    """Both tiers of replicas of a model; the decode tier, which calls the other."""
    digest = model_digest(model.resolved.source, model.config)
    prefill = build_llm_deployment(
        llm_config(model, KVRole.PREFILL),
        name_prefix=PREFILL_PREFIX,
        deployment_cls=PrefillServer,
        bind_kwargs={"node": _prefill_node(model, cores, digest), "router": router},
    )
    return build_llm_deployment(
        llm_config(model, KVRole.DECODE),
        name_prefix=DECODE_PREFIX,
        deployment_cls=DecodeServer,
        bind_kwargs={
            "node": _decode_node(model.config, cores, digest),
            "router": router,
            "prefill_server": prefill,
        },
    )


def _prefill_node(model: FoundModel, cores: CorePlan, digest: ModelDigest) -> PrefillNodeConfig:
    config, profile = model.config, model.profile
    predictor = None if profile is None else profile.predictor
    handoff_s = config.handoff_s()
    if profile is not None and profile.predictor.handoff_s > 0:
        handoff_s = profile.predictor.handoff_s
    preemption = config.preemption
    rules, tiers = preemption.rules(config.accelerator), config.tiers.tier_set()
    setup = EngineSetup(
        mode=preemption.mode.value,
        order=preemption.order.value,
        granularity=preemption.granularity,
        compiled=preemption.compiled,
        launch_ahead_s=preemption.launch_ahead_ms / 1e3,
        stop_within_s=preemption.stop_within_s(config.accelerator),
        vote_timeout_s=preemption.vote_timeout_s,
        join_tokens=preemption.join_tokens,
        stock=stock_prefill(config),
        limits=rules.limits,
        shares=shares_of(tiers),
        starvation_timeout_s=config.fairness.starvation_timeout_s,
        targets=preemption.targets(tiers),
    )
    return PrefillNodeConfig(
        predictor,
        handoff_s,
        config.warm_up(),
        tiers,
        rules,
        setup,
        cores.prefill,
        drain_s=config.prefill.drain_s,
        max_ongoing_requests=config.prefill.max_ongoing_requests,
        profiled=UNKNOWN if profile is None else profile.subject,
        subject=model.subject,
        is_monitored=config.monitor.enabled,
        tracing=config.tracing.options(),
        hung_after_s=config.prefill.hung_after(config.accelerator),
        digest=digest,
    )


def _decode_node(config: SlackServeConfig, cores: CorePlan, digest: ModelDigest) -> DecodeNodeConfig:
    tiers = config.tiers.tier_set()
    sheddable = [tier for tier, policy in tiers.items() if policy.sheddable]
    return DecodeNodeConfig(
        config.prefill.fewest,
        tiers,
        cores.decode,
        replacement=ReplacementRules(config.router.max_replacements, frozenset(sheddable)),
        max_ongoing_requests=config.decode.max_ongoing_requests,
        local_prefill=config.degraded.local_prefill,
        at_once=config.degraded.at_once,
        max_prompts=config.degraded.max_prompts,
        max_wait_s=config.admission.max_backlog_s,
        router_timeout_s=config.router_timeout_s(),
        is_monitored=config.monitor.enabled,
        tracing=config.tracing.options(),
        grammars=GrammarLimits(config.limits.grammar_timeout_s, config.limits.max_grammar_mib),
        max_logprobs=config.limits.max_logprobs,
        leaves=config.pressure.enabled and config.pressure.reprefill,
        droppable=config.pressure.droppable(tiers),
        hung_after_s=config.decode.hung_after(config.accelerator),
        digest=digest,
    )


def llm_config(model: FoundModel, role: KVRole) -> LLMConfig:
    """What Ray Serve LLM is told of one tier.

    Raises:
        ConfigError: when vLLM does not take it.
    """
    config, found, is_prefill = model.config, model.resolved, role is KVRole.PREFILL
    pool = config.prefill if is_prefill else config.decode
    pinned = PinnedPrefill if is_prefill else PinnedDecode
    return ConfigWithParsers(
        model_loading_config={"model_id": found.model_id, "model_source": found.source},
        accelerator_type=pool.accelerator_type or config.accelerator_type,
        engine_kwargs=engine_kwargs(config, model.native_length, pool, role)
        | model.sampling
        | model.adapters,
        runtime_env={"env_vars": _environment(model, pool)},
        callback_config={"callback_class": "deployments.engines.environment.EngineLoadsModel"},
        experimental_configs={
            "stream_batching_interval_ms": 0,
            PORT_BASE: config.kv_transfer.prefill_port if is_prefill else config.kv_transfer.decode_port,
        },
        deployment_config={
            **_size(model, pool, role),
            "max_ongoing_requests": NO_LIMIT,
            "request_router_config": RequestRouterConfig(request_router_class=pinned),
            "logging_config": logging_of(config).model_dump(),
            # Three failures in a row have Serve replace a replica, such as one whose engine has died.
            "health_check_period_s": _HEALTH_CHECK_S,
            "graceful_shutdown_wait_loop_s": 0.5,
            "graceful_shutdown_timeout_s": pool.drain_s,
            # Serve repeats the one selector for each bundle.
            "placement_group_bundle_label_selector": [pool.node_labels] if pool.node_labels else None,
        },
        **_hardware(config, pool),
    )


def _size(model: FoundModel, pool: PoolConfig, role: KVRole) -> dict[str, Any]:
    """How many replicas there are, or who decides it."""
    if pool.max_replicas is None:
        return {"num_replicas": pool.replicas}
    is_prefill = role is KVRole.PREFILL
    rules = model.config.autoscaling.rules(pool, is_prefill=is_prefill)
    policy = {
        "policy_function": f"{TierAutoscaler.__module__}.{TierAutoscaler.__qualname__}",
        "policy_kwargs": {
            "role": "prefill" if is_prefill else "decode",
            "model": model.name,
            "code": running_code(),
            "starts_with": pool.replicas,
            **dataclasses.asdict(rules),
        },
    }
    return {
        "autoscaling_config": {
            "min_replicas": rules.min_replicas,
            "max_replicas": rules.max_replicas,
            # The policy has waited as long as it wants to.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": policy,
        }
    }


def _hardware(config: SlackServeConfig, pool: PoolConfig) -> dict[str, Any]:
    """What each worker takes, and whether all of a replica are on one node."""
    on_cpu = config.accelerator == "cpu"
    return {
        "accelerator_config": {"kind": "cpu" if on_cpu else "gpu"},
        "placement_group_config": {
            "bundle_per_worker": {"CPU": 1} if on_cpu else {"GPU": pool.gpus_per_worker},
            "strategy": "PACK" if pool.across_nodes else "STRICT_PACK",
        },
    }


def _environment(model: FoundModel, pool: PoolConfig) -> dict[str, str]:
    """Environment of the replicas, and so of their engines."""
    env = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # The host that a redirect leads to is held against no list.
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        _IMAGE_PIXELS: os.environ.get(_IMAGE_PIXELS, str(model.config.limits.max_image_pixels)),
    }
    if offline := os.environ.get(_OFFLINE, "1" if _is_all_here(model) else ""):
        env[_OFFLINE] = offline
    if model.config.accelerator == "cpu":
        env |= cpu_environment(model.config.kv_cache_gib)
    elif pool.gpus_per_worker < 1:
        # Ray tells it to tasks that a replica starts; its engine would ask for a whole GPU, and not start.
        env[GPU_PER_WORKER] = str(pool.gpus_per_worker)
    return env


def _is_all_here(model: FoundModel) -> bool:
    """Whether the engines load nothing from the Hugging Face hub."""
    tiers = [pool.engine_kwargs for pool in (model.config.prefill, model.config.decode)]
    if any(given.get("trust_remote_code") for given in tiers):
        return False  # the configuration of a model that is here may name code that is not
    return all(Path(place).is_dir() for given in tiers for place in _loaded(model, given))


def _loaded(model: FoundModel, given: Mapping[str, Any]) -> Iterator[str]:
    """Directories or Hugging Face ids of all that an engine with these arguments loads."""
    yield model.resolved.source
    yield from (adapter.path for adapter in model.adapters.get("lora_modules", ()))
    places = (
        (given.get("speculative_config") or {}).get("model"),
        given.get("hf_config_path"),
        given.get("generation_config"),
    )
    yield from (place for place in places if place not in _NO_PLACES)


def logging_of(config: SlackServeConfig) -> LoggingConfig:
    """How a deployment logs."""
    return LoggingConfig(encoding="JSON" if config.log_json else "TEXT", enable_access_log=False)
