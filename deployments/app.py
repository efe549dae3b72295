"""The Serve application: `deployments.app:build`.

For `slackserve serve`, `serve run`, `serve deploy` and a RayService's `serveConfigV2` alike. Owns how the
deployments fit together, and what ingress, router and monitor are started with; refuses what cannot work
before anything starts.
"""

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig
from deployments.engines.cpu_plan import CorePlan, Workers, plan_cores
from deployments.grpc.methods import InferenceIngress
from deployments.http.ingress import IngressConfig
from deployments.http.key_watch import KeyWatch
from deployments.http.model_config import ModelConfig
from deployments.http.routes import make_ingress
from deployments.http.served_model import WaysConfig
from deployments.local.machine import SMALL_CPUS
from deployments.models.card import card_of
from deployments.models.embedded import ModelStoreError
from deployments.models.found import FoundModel
from deployments.monitor.actor import MonitorOptions, start_own_monitor
from deployments.names import INGRESS_NAME, ROUTER_NAME
from deployments.replicas import NO_LIMIT, logging_of, replicas
from router.serve.deployment import SlackRouter
from router.serve.ingress_choice import AnyIngress
from router.serve.model_router import Route, RouterConfig
from slo.predict.handoff import TransferFit
from telemetry.reporting.of_model import in_names


def build(config: SlackServeConfig) -> serve.Application:
    """Build the application for a Ray cluster.

    Args:
        config: Typed arguments; Serve turns a mapping into them and refuses what does not fit.

    Raises:
        ConfigError: when the configuration cannot work, naming the key.
    """
    # A quota is left to the replicas: that of the pod in which this runs says nothing of theirs.
    return application(config, sorted(os.sched_getaffinity(0)))


def application(config: SlackServeConfig, cores: Sequence[int]) -> serve.Application:
    """Build the application for nodes with these cores.

    Raises:
        ConfigError: when the configuration cannot work, naming the key.
    """
    configs = config.of_each_model()
    models = found_models(config)
    keys = KeyWatch(config.key_source())
    monitor = _monitor(config, models)
    router = _router(config, models, monitor)
    decode = [
        replicas(model, plan, router) for model, plan in zip(models, _core_plans(configs, cores), strict=True)
    ]
    ingress = serve.deployment(
        make_ingress(InferenceIngress, keys, config.limits),
        name=INGRESS_NAME,
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options=_small_actor(config),
        logging_config=logging_of(config),
        request_router_config=RequestRouterConfig(request_router_class=AnyIngress),
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=max(each.decode.drain_s for each in configs),
        **_spread(config),
    )
    return ingress.bind(
        llm_deployments={
            name: each for model, each in zip(models, decode, strict=True) for name in model.names
        },
        model_cards={name: card_of(name, model) for model in models for name in model.names},
        config=IngressConfig(
            tuple(_told(model) for model in models),
            {name: model.name for model in models for name in model.names},
            config.tiers.tier_set(),
            config.limits,
            WaysConfig(config.router_timeout_s(), config.router.max_replacements, monitor),
            config.tracing.options(),
        ),
        router=router,
    )


def found_models(config: SlackServeConfig) -> list[FoundModel]:
    """The models of a configuration, each with names of its own.

    Raises:
        ConfigError: when one cannot be served as configured.
        ModelStoreError: when the first one is not there.
    """
    models = [FoundModel.of(config)]
    for each in config.of_each_model()[1:]:
        try:
            models.append(FoundModel.of(each))
        except (ConfigError, ModelStoreError) as error:
            raise ConfigError(f"models.{each.model_name}: {error}") from None
    _check_names(models)
    return models


def _spread(config: SlackServeConfig) -> dict[str, Any]:
    """How many ingresses may be on a node, and how many more there may be during an upgrade, in percent.

    Serve moves no replica later, and a node without one has no proxy. Where each ingress has a node of its
    own, one that comes for a lost node gets an ingress.
    """
    if config.node_labels and config.ingress_replicas > 1:
        # One more would wait for ever: one of the old ends first, and the others serve.
        return {"max_replicas_per_node": 1}
    # One of new code is there before one of the old ends: none refuses meanwhile.
    return {"max_surge_percent": 100}


def _told(model: FoundModel) -> ModelConfig:
    """What the ingress is told of a model."""
    shows_usage = bool(model.config.decode.engine_kwargs.get("enable_force_include_usage"))
    return ModelConfig(model.name, model.longest, model.max_output_tokens, model.sampled_with, shows_usage)


def _check_names(models: Sequence[FoundModel]) -> None:
    """Make sure that each name means one model or adapter, and one deployment, and that Ray can find it."""
    for name in (name for model in models for name in model.names):
        # Ray reads what is behind a colon as an adapter, two dashes as a slash, and takes no "#".
        if bad := next((each for each in (":", "--", "#") if each in name), None):
            msg = (
                f"{name!r} is the name of a model or adapter and has {bad!r}, with which it would not be "
                "found; give it another (model_name)"
            )
            raise ConfigError(msg)
    counts = Counter(name for model in models for name in model.names)
    if twice := [name for name, count in counts.items() if count > 1]:
        msg = f"models: {twice[0]!r} is the name of two models or adapters; give each a name of its own"
        raise ConfigError(msg)
    parts: dict[str, str] = {}
    for model in models:
        if (other := parts.setdefault(in_names(model.name), model.name)) != model.name:
            msg = (
                f"models: {other!r} and {model.name!r} differ only in characters that are replaced in the "
                "names of deployments; give one of them another name"
            )
            raise ConfigError(msg)


def _monitor(config: SlackServeConfig, models: Sequence[FoundModel]) -> MonitorOptions | None:
    """What router and ingresses start the SLO monitor with; who builds the application need not live on."""
    monitor = config.monitor
    if not monitor.enabled:
        return None
    tiers = config.tiers.tier_set()
    return MonitorOptions(
        {model.name: monitor.settings(config.preemption, tiers, model.names) for model in models},
        on_head=monitor.node == "head",
    )


def _router(
    config: SlackServeConfig, models: Sequence[FoundModel], monitor: MonitorOptions | None
) -> DeploymentHandle:
    deployment = serve.deployment(
        SlackRouter,
        name=ROUTER_NAME,
        num_replicas=1,
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options=_small_actor(config),
        logging_config=logging_of(config),
        graceful_shutdown_wait_loop_s=0.1,
    )
    return deployment.bind(
        RouterConfig(
            config.tiers.tier_set(),
            config.router.placement,
            config.router.limits(config.degraded),
            {
                model.name: Route(_link(model), model.config.kv_transfer.local_below, model.longest)
                for model in models
            },
            config.admission.rules(),
            None if monitor is None else partial(start_own_monitor, monitor),
        )
    )


def _small_actor(config: SlackServeConfig) -> dict[str, Any]:
    """What an actor without an engine takes, and where it runs."""
    where = {"label_selector": config.node_labels} if config.node_labels else {}
    return {"num_cpus": SMALL_CPUS, **where}


def _link(model: FoundModel) -> TransferFit | None:
    """What its KV moves over, as far as it is configured or was measured."""
    if (configured := model.config.kv_transfer.link) is not None:
        return configured.link()
    return None if model.profile is None else model.profile.transfer


def _core_plans(configs: Sequence[SlackServeConfig], cores: Sequence[int]) -> list[CorePlan]:
    """The cores of each model's replicas."""
    if configs[0].accelerator != "cpu" or not configs[0].pin_cores:
        return [CorePlan((), ()) for _ in configs]
    workers = [
        Workers(
            config.prefill.most,
            config.decode.most,
            config.prefill.tensor_parallel_size,
            config.decode.tensor_parallel_size,
        )
        for config in configs
    ]
    return plan_cores(cores, *workers)
