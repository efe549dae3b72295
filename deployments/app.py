"""The Serve application: `deployments.app:build`.

For `slackserve serve`, `serve run`, `serve deploy` and a RayService's `serveConfigV2` alike. Owns how the
deployments fit together and what each is started with; refuses what cannot work before anything starts.
"""

import dataclasses
import difflib
import json
import math
import os
from pathlib import Path
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import ModelCard
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig, build_llm_deployment
from ray.serve.schema import LoggingConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from decode_node.server import DecodeNodeConfig, DecodeServer
from deployments.calibrate.profile import profile_of
from deployments.config import ConfigError
from deployments.config.settings import PoolConfig, SlackServeConfig
from deployments.http.ingress import IngressConfig, make_ingress
from deployments.local.cpu_plan import CorePlan, plan_cores
from deployments.local.engine_start import cpu_environment
from deployments.local.launcher import DECODE_PREFIX, PREFILL_PREFIX, ROUTER_NAME
from deployments.models.store import ModelStore, ResolvedModel
from deployments.monitor.actor import MonitorOptions
from kv_transfer.connector import KVRole, kv_transfer_config
from prefill_node.engine_setup import EngineSetup, shares_of
from prefill_node.replica.server import PrefillNodeConfig, PrefillServer
from router.core import RouterLimits
from router.fleet.decode_replica import KvLink
from router.serve.deployment import RouterConfig, SlackRouter
from router.serve.replica_pinning import PinnedDecode, PinnedPrefill
from slo.files.profile import Profile
from slo.predict.measured_on import UNKNOWN, Subject
from slo.preemption.types import PreemptionMode
from slo.queue.batching import STEP_TOKENS
from slo.replacement import ReplacementRules

INGRESS_NAME = "Ingress"
_SMALL_CPUS = 0.1
_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of two kinds of numbers."""
_SCHEDULER = "prefill_node.engine.scheduler.SlackScheduler"
_WORKERS = {
    "cpu": "prefill_node.worker.cpu.PreemptibleCPUWorker",
    "cuda": "prefill_node.worker.cuda.PreemptibleGPUWorker",
}


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
    _check_engine_kwargs(config)
    _check_model_fits(config, model)
    keys = config.key_ring()
    cores = _core_plan(config)
    router = _router(config, profile)
    prefill = build_llm_deployment(
        _llm_config(config, model, config.prefill, KVRole.PREFILL),
        name_prefix=PREFILL_PREFIX,
        deployment_cls=PrefillServer,
        bind_kwargs={"node": _prefill_node(config, cores, subject, profile), "router": router},
    )
    decode_config = _llm_config(config, model, config.decode, KVRole.DECODE)
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
        make_ingress(keys, config.limits.max_body_bytes),
        name=INGRESS_NAME,
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": _SMALL_CPUS},
        logging_config=_logging(config),
        graceful_shutdown_wait_loop_s=0.5,
    )
    return ingress.bind(
        llm_deployments={model.model_id: decode},
        model_cards={model.model_id: _model_card(model.model_id, decode_config)},
        config=IngressConfig(config.tiers.tier_set(), config.router_timeout_s(), _monitor(config)),
        router=router,
    )


def _monitor(config: SlackServeConfig) -> MonitorOptions | None:
    """What an ingress starts the SLO monitor with; whoever builds the application need not live on."""
    monitor = config.monitor
    if not monitor.enabled:
        return None
    return MonitorOptions(
        monitor.settings(config.preemption, config.tiers.tier_set()), monitor.host, monitor.port
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


def _router(config: SlackServeConfig, profile: Profile | None) -> DeploymentHandle:
    deployment = serve.deployment(
        SlackRouter,
        name=ROUTER_NAME,
        num_replicas=1,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": _SMALL_CPUS},
        logging_config=_logging(config),
        graceful_shutdown_wait_loop_s=0.1,
    )
    given = config.router
    limits = RouterLimits(
        stale_after_s=given.stale_after_s,
        silent_after_s=given.silent_after_s,
        stretch=given.stretch,
    )
    return deployment.bind(
        RouterConfig(
            config.tiers.tier_set(),
            given.placement,
            limits,
            config.admission.rules(),
            config.tenant_limits(),
            config.admission.default_limits.limit(),
            _link(profile) if config.kv_transfer.link is None else config.kv_transfer.link.link(),
            config.monitor.enabled,
        )
    )


def _link(profile: Profile | None) -> KvLink | None:
    """What grows with the prompt between prefill and first token, as the router reckons with it."""
    if profile is None or profile.handoff is None:
        return None
    handoff, size_bytes = profile.handoff.model(), profile.kv_bytes_per_token
    bytes_ps = size_bytes / handoff.per_token_s if handoff.per_token_s > 0 else math.inf
    return KvLink(size_bytes, bytes_ps, handoff.latency_s)


def _prefill_node(
    config: SlackServeConfig, cores: CorePlan, subject: Subject, profile: Profile | None
) -> PrefillNodeConfig:
    predictor = None if profile is None else profile.predictor
    handoff_s = config.handoff_ms / 1e3
    if profile is not None and (profile.handoff is not None or profile.predictor.handoff_s > 0):
        handoff_s = profile.predictor.handoff_s
    preemption = config.preemption
    rules, fairness, tiers = preemption.rules(), config.fairness.rules(), config.tiers.tier_set()
    setup = EngineSetup(
        mode=preemption.mode.value,
        order=preemption.order.value,
        granularity=preemption.granularity,
        launch_ahead=preemption.launch_ahead,
        vote_timeout_s=preemption.vote_timeout_s,
        join_tokens=preemption.join_tokens,
        max_suspended_s=rules.limits.max_suspended_s,
        max_suspended_steps=rules.limits.max_suspended_steps,
        max_suspended_bytes=rules.limits.max_suspended_bytes,
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
        profiled=UNKNOWN if profile is None else profile.subject,
        subject=subject,
        is_monitored=config.monitor.enabled,
    )


def _decode_node(config: SlackServeConfig, cores: CorePlan) -> DecodeNodeConfig:
    sheddable = [tier for tier, policy in config.tiers.tier_set().items() if policy.sheddable]
    return DecodeNodeConfig(
        config.prefill.replicas,
        cores.decode,
        replacement=ReplacementRules(config.router.max_replacements, frozenset(sheddable)),
        router_timeout_s=config.router_timeout_s(),
        is_monitored=config.monitor.enabled,
    )


def _llm_config(config: SlackServeConfig, model: ResolvedModel, pool: PoolConfig, role: KVRole) -> LLMConfig:
    is_prefill = role is KVRole.PREFILL
    pinned = PinnedPrefill if is_prefill else PinnedDecode
    return LLMConfig(
        model_loading_config={"model_id": model.model_id, "model_source": model.source},
        accelerator_type=config.accelerator_type,
        engine_kwargs=_engine_kwargs(config, model, pool, role),
        runtime_env={"env_vars": _environment(config, model, role)},
        callback_config={"callback_class": "deployments.local.engine_start.EngineLoadsModel"},
        experimental_configs={
            "stream_batching_interval_ms": 0,
            "NIXL_SIDE_CHANNEL_PORT_BASE": (
                config.kv_transfer.prefill_port if is_prefill else config.kv_transfer.decode_port
            ),
        },
        deployment_config={
            "num_replicas": pool.replicas,
            "max_ongoing_requests": pool.max_ongoing_requests,
            "request_router_config": RequestRouterConfig(request_router_class=pinned),
            "logging_config": _logging(config).model_dump(),
            "graceful_shutdown_wait_loop_s": 0.5,
            "graceful_shutdown_timeout_s": pool.drain_s,
        },
        **_hardware(config, pool),
    )


def _hardware(config: SlackServeConfig, pool: PoolConfig) -> dict[str, Any]:
    if config.accelerator == "cuda":
        return {}
    bundles = [{"CPU": 1}] * pool.tensor_parallel_size
    return {"accelerator_config": {"kind": "cpu"}, "placement_group_config": {"bundles": bundles}}


def _engine_kwargs(
    config: SlackServeConfig, model: ResolvedModel, pool: PoolConfig, role: KVRole
) -> dict[str, Any]:
    buffer_device = config.kv_transfer.buffer_device
    kwargs: dict[str, Any] = {
        "tensor_parallel_size": pool.tensor_parallel_size,
        "async_scheduling": False,
        "kv_transfer_config": kv_transfer_config(
            role, config.accelerator if buffer_device == "auto" else buffer_device, config.kv_transfer.lease_s
        ),
    }
    if config.max_model_len is not None:
        kwargs["max_model_len"] = config.max_model_len
    if config.accelerator == "cpu":
        kwargs |= {"enforce_eager": True, "dtype": "float32"}
    if config.dtype is not None:
        kwargs["dtype"] = config.dtype
    if role is KVRole.PREFILL:
        kwargs["scheduler_cls"] = _SCHEDULER
        kwargs["worker_cls"] = _WORKERS[config.accelerator]
        if config.preemption.mode is not PreemptionMode.OFF:
            # A compiled forward pass is one piece, which cannot stop between two layers.
            kwargs["enforce_eager"] = True
        if (longest := config.max_model_len or _longest(model)) is not None:
            kwargs["max_num_batched_tokens"] = min(longest, STEP_TOKENS)
    return kwargs | pool.engine_kwargs


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
        config.prefill.replicas,
        config.decode.replicas,
        config.prefill.tensor_parallel_size,
        config.decode.tensor_parallel_size,
    )


def _check_engine_kwargs(config: SlackServeConfig) -> None:
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for section in ("prefill", "decode"):
        for key in getattr(config, section).engine_kwargs:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "see vLLM's engine arguments"
                msg = f"{section}.engine_kwargs: vLLM has no engine argument {key!r}; {hint}"
                raise ConfigError(msg)


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


def _model_card(model_id: str, config: LLMConfig) -> ModelCard:
    metadata = {"model_id": model_id, "max_request_context_length": config.max_request_context_length}
    return ModelCard(id=model_id, object="model", owned_by="slackserve", permission=[], metadata=metadata)


def _logging(config: SlackServeConfig) -> LoggingConfig:
    return LoggingConfig(encoding="JSON" if config.log_json else "TEXT", enable_access_log=False)
