"""The Serve application: `deployments.app:build`.

For `slackserve serve`, `serve run`, `serve deploy` and a RayService's `serveConfigV2` alike. Owns how the
deployments fit together and what each is started with; refuses what cannot work before anything starts.
"""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import ModelCard
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig, build_llm_deployment
from ray.serve.schema import LoggingConfig

from decode_node.grammar_check import GrammarLimits
from decode_node.server import DecodeNodeConfig, DecodeServer
from deployments.autoscaling import TierAutoscaler
from deployments.calibrate.profile import profile_of
from deployments.config import ConfigError
from deployments.config.settings import PoolConfig, SlackServeConfig
from deployments.engine_kwargs import check_engine_kwargs, engine_kwargs
from deployments.grpc.methods import InferenceIngress
from deployments.http.ingress import IngressConfig, make_ingress
from deployments.http.key_watch import KeyWatch
from deployments.local.cpu_plan import CorePlan, plan_cores
from deployments.local.engine_start import cpu_environment
from deployments.local.launcher import DECODE_PREFIX, PREFILL_PREFIX, ROUTER_NAME
from deployments.models.adapters import adapter_kwargs
from deployments.models.store import ModelStore, ResolvedModel
from deployments.monitor.actor import MonitorOptions, start_own_monitor
from kv_transfer.connector import KVRole
from prefill_node.engine_setup import EngineSetup, shares_of
from prefill_node.replica.server import PrefillNodeConfig, PrefillServer
from router.fleet.decode_replica import KvLink
from router.serve.deployment import RouterConfig, SlackRouter
from router.serve.replica_pinning import PinnedDecode, PinnedPrefill
from slo.files.profile import Profile
from slo.predict.measured_on import UNKNOWN, Subject
from slo.preemption.types import PreemptionMode
from slo.replacement import ReplacementRules

INGRESS_NAME = "Ingress"
_SMALL_CPUS = 0.1
_HEALTH_CHECK_S = 2.0
_NO_LIMIT = 100_000
"""Of calls that Serve lets a replica have at once."""
_UNKNOWN_LENGTH = 32_768
"""Tokens that a model takes which vLLM has yet to fetch, for what a request without `max_tokens` reserves."""
_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of two kinds of numbers."""


def build(config: SlackServeConfig) -> serve.Application:
    """Build the application.

    Args:
        config: Typed arguments; Serve turns a mapping into them and refuses what does not fit.

    Raises:
        ConfigError: when the configuration cannot work, naming the key.
    """
    model = ModelStore().resolve(config.model)
    subject = _subject(config, model)
    profile = None if config.profile is None else profile_of(config.profile, subject)
    model = dataclasses.replace(model, model_id=config.model_name or model.model_id)
    check_engine_kwargs(config)
    adapters = adapter_kwargs(config.lora.adapters, config.lora.max_rank, model.model_id)
    _check_model_fits(config, model)
    keys = KeyWatch(config.key_source())
    cores = _core_plan(config)
    monitor = _monitor(config, (model.model_id, *config.lora.adapters))
    router = _router(config, profile, monitor)
    prefill = build_llm_deployment(
        _llm_config(config, model, config.prefill, KVRole.PREFILL, adapters),
        name_prefix=PREFILL_PREFIX,
        deployment_cls=PrefillServer,
        bind_kwargs={"node": _prefill_node(config, cores, subject, profile), "router": router},
    )
    decode_config = _llm_config(config, model, config.decode, KVRole.DECODE, adapters)
    decode = build_llm_deployment(
        decode_config,
        name_prefix=DECODE_PREFIX,
        deployment_cls=DecodeServer,
        bind_kwargs={
            "node": _decode_node(config, cores),
            "router": router,
            "prefill_server": prefill,
        },
    )
    ingress = serve.deployment(
        make_ingress(InferenceIngress, keys, config.limits),
        name=INGRESS_NAME,
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=_NO_LIMIT,
        ray_actor_options=_small_actor(config),
        logging_config=_logging(config),
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=config.decode.drain_s,
        # An ingress of new code is there before one of the old goes: none refuses meanwhile.
        max_surge_percent=100,
    )
    names = [model.model_id, *config.lora.adapters]
    return ingress.bind(
        llm_deployments=dict.fromkeys(names, decode),
        model_cards={name: _model_card(name, model.model_id, decode_config) for name in names},
        config=IngressConfig(
            model.model_id,
            config.tiers.tier_set(),
            config.router_timeout_s(),
            config.limits,
            config.max_model_len or _longest(model) or _UNKNOWN_LENGTH,
            config.router.max_replacements,
            monitor,
            config.tracing.options(),
        ),
        router=router,
    )


def _monitor(config: SlackServeConfig, models: tuple[str, ...]) -> MonitorOptions | None:
    """What router and ingresses start the SLO monitor with; who builds the application need not live on."""
    monitor = config.monitor
    if not monitor.enabled:
        return None
    return MonitorOptions(
        monitor.settings(config.preemption, config.tiers.tier_set(), models),
        monitor.host,
        monitor.port,
        on_head=monitor.node == "head",
    )


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


def _router(
    config: SlackServeConfig, profile: Profile | None, monitor: MonitorOptions | None
) -> DeploymentHandle:
    deployment = serve.deployment(
        SlackRouter,
        name=ROUTER_NAME,
        num_replicas=1,
        max_ongoing_requests=_NO_LIMIT,
        ray_actor_options=_small_actor(config),
        logging_config=_logging(config),
        graceful_shutdown_wait_loop_s=0.1,
    )
    return deployment.bind(
        RouterConfig(
            config.tiers.tier_set(),
            config.router.placement,
            config.router.limits(config.degraded, config.kv_transfer.local_below),
            config.admission.rules(),
            _link(profile) if config.kv_transfer.link is None else config.kv_transfer.link.link(),
            None if monitor is None else partial(start_own_monitor, monitor),
        )
    )


def _small_actor(config: SlackServeConfig) -> dict[str, Any]:
    """What an actor without an engine takes, and where it runs."""
    where = {"label_selector": config.node_labels} if config.node_labels else {}
    return {"num_cpus": _SMALL_CPUS, **where}


def _link(profile: Profile | None) -> KvLink | None:
    """What KV moves over, as far as it was measured."""
    if profile is None or (link := profile.link(profile.kv_bytes_per_token)) is None:
        return None
    return KvLink(profile.kv_bytes_per_token, link.bytes_ps, link.latency_s)


def _prefill_node(
    config: SlackServeConfig, cores: CorePlan, subject: Subject, profile: Profile | None
) -> PrefillNodeConfig:
    predictor = None if profile is None else profile.predictor
    handoff_s = config.handoff_ms / 1e3
    if profile is not None and profile.predictor.handoff_s > 0:
        handoff_s = profile.predictor.handoff_s
    preemption = config.preemption
    rules, fairness, tiers = preemption.rules(), config.fairness.rules(), config.tiers.tier_set()
    setup = EngineSetup(
        mode=preemption.mode.value,
        order=preemption.order.value,
        granularity=preemption.granularity,
        compiled=preemption.compiled,
        launch_ahead=preemption.launch_ahead,
        vote_timeout_s=preemption.vote_timeout_s,
        join_tokens=preemption.join_tokens,
        limits=rules.limits,
        shares=shares_of(tiers),
        starvation_timeout_s=fairness.starvation_timeout_s,
    )
    weights = {tier: policy.weight for tier, policy in tiers.items()}
    return PrefillNodeConfig(
        predictor,
        handoff_s,
        config.warmup_tokens,
        weights,
        rules,
        setup,
        cores.prefill,
        drain_s=config.prefill.drain_s,
        max_ongoing_requests=config.prefill.max_ongoing_requests,
        profiled=UNKNOWN if profile is None else profile.subject,
        subject=subject,
        is_monitored=config.monitor.enabled,
        tracing=config.tracing.options(),
    )


def _decode_node(config: SlackServeConfig, cores: CorePlan) -> DecodeNodeConfig:
    sheddable = [tier for tier, policy in config.tiers.tier_set().items() if policy.sheddable]
    return DecodeNodeConfig(
        config.prefill.fewest,
        cores.decode,
        replacement=ReplacementRules(config.router.max_replacements, frozenset(sheddable)),
        max_ongoing_requests=config.decode.max_ongoing_requests,
        local_prefills=config.degraded.at_once if config.degraded.local_prefill else 0,
        router_timeout_s=config.router_timeout_s(),
        is_monitored=config.monitor.enabled,
        tracing=config.tracing.options(),
        grammars=GrammarLimits(config.limits.grammar_timeout_s, config.limits.max_grammar_mib),
    )


def _llm_config(
    config: SlackServeConfig, model: ResolvedModel, pool: PoolConfig, role: KVRole, adapters: dict[str, Any]
) -> LLMConfig:
    is_prefill = role is KVRole.PREFILL
    pinned = PinnedPrefill if is_prefill else PinnedDecode
    return LLMConfig(
        model_loading_config={"model_id": model.model_id, "model_source": model.source},
        accelerator_type=pool.accelerator_type or config.accelerator_type,
        engine_kwargs=engine_kwargs(config, _longest(model), pool, role) | adapters,
        runtime_env={"env_vars": _environment(config, model, role)},
        callback_config={"callback_class": "deployments.local.engine_start.EngineLoadsModel"},
        experimental_configs={
            "stream_batching_interval_ms": 0,
            "NIXL_SIDE_CHANNEL_PORT_BASE": (
                config.kv_transfer.prefill_port if is_prefill else config.kv_transfer.decode_port
            ),
        },
        deployment_config={
            **_size(config, pool, role),
            "max_ongoing_requests": _NO_LIMIT,
            "request_router_config": RequestRouterConfig(request_router_class=pinned),
            "logging_config": _logging(config).model_dump(),
            # Three failures in a row have Serve replace a replica, such as one whose engine has died.
            "health_check_period_s": _HEALTH_CHECK_S,
            "graceful_shutdown_wait_loop_s": 0.5,
            "graceful_shutdown_timeout_s": pool.drain_s,
            # Serve repeats the one selector for each bundle.
            "placement_group_bundle_label_selector": [pool.node_labels] if pool.node_labels else None,
        },
        **_hardware(config, pool),
    )


def _size(config: SlackServeConfig, pool: PoolConfig, role: KVRole) -> dict[str, Any]:
    """How many replicas there are, or who decides it."""
    if pool.max_replicas is None:
        return {"num_replicas": pool.replicas}
    rules = config.autoscaling.rules(pool)
    policy = {
        "policy_function": f"{TierAutoscaler.__module__}.{TierAutoscaler.__qualname__}",
        "policy_kwargs": {
            "role": "prefill" if role is KVRole.PREFILL else "decode",
            **dataclasses.asdict(rules),
        },
    }
    return {
        "autoscaling_config": {
            "min_replicas": rules.min_replicas,
            "initial_replicas": pool.replicas,
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


def _environment(config: SlackServeConfig, model: ResolvedModel, role: KVRole) -> dict[str, str]:
    """Environment of the replicas, and so of their engines."""
    env = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1"}
    if Path(model.source).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if config.accelerator == "cpu":
        env |= cpu_environment(config.kv_cache_gib)
    elif role is KVRole.PREFILL and config.preemption.mode is not PreemptionMode.OFF:
        # A step can only be stopped and issued again with vLLM's first model runner.
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return env


def _core_plan(config: SlackServeConfig) -> CorePlan:
    if config.accelerator != "cpu" or not config.pin_cores:
        return CorePlan((), ())
    return plan_cores(
        sorted(os.sched_getaffinity(0)),
        config.prefill.most,
        config.decode.most,
        config.prefill.tensor_parallel_size,
        config.decode.tensor_parallel_size,
    )


def _check_model_fits(config: SlackServeConfig, model: ResolvedModel) -> None:
    """Compare a local model's own configuration with what is asked of it."""
    values = _model_values(model)
    longest = _longest(model)
    if config.max_model_len is not None and longest is not None and config.max_model_len > longest:
        msg = f"max_model_len: {config.max_model_len} is more than the model's {longest}"
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


def _model_values(model: ResolvedModel) -> dict[str, Any]:
    """A local model's config.json; empty for a model that vLLM has yet to fetch."""
    path = Path(model.source) / "config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _longest(model: ResolvedModel) -> int | None:
    longest = _model_values(model).get("max_position_embeddings")
    return None if longest is None else int(longest)


def _model_card(name: str, model_id: str, config: LLMConfig) -> ModelCard:
    """What is told of the model, or of an adapter of it."""
    metadata = {"model_id": name, "max_request_context_length": config.max_request_context_length}
    if name != model_id:
        metadata["parent"] = model_id
    return ModelCard(id=name, object="model", owned_by="slackserve", permission=[], metadata=metadata)


def _logging(config: SlackServeConfig) -> LoggingConfig:
    return LoggingConfig(encoding="JSON" if config.log_json else "TEXT", enable_access_log=False)
