"""What keeps a configuration from being served on this machine, as far as that shows without Ray and engines.

Owns no rule: what `slackserve serve` asks before it starts something, and where it builds the application, is
asked here, too. Not whether ports are free, which the server that is to be replaced may have; nor what only
Ray or an engine knows: GPUs, what is on the hub, whether weights fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from deployments.app import found_models
from deployments.calibrate.profile import load_profile
from deployments.config import ConfigError
from deployments.engines.arguments import check_engine_kwargs
from deployments.local.checks import CHECKS_OF_THIS_MACHINE, check_ports
from deployments.local.machine import check_packages
from deployments.models.adapters import find_adapters
from deployments.models.embedded import EmbeddedModelMissingError, ModelStoreError
from deployments.models.fit import check_ahead
from deployments.models.found import FoundModel
from deployments.ray_names import check_ray_names
from deployments.replicas import llm_config
from kv_transfer.connector import KVRole

if TYPE_CHECKING:
    from deployments.config.settings import SlackServeConfig

Check: TypeAlias = Callable[[], object]
"""Raises what is wrong."""


def problems(config: SlackServeConfig) -> list[str]:
    """What is wrong with it, each thing once; empty where it can be started.

    The embedded model is prepared where it is not.
    """
    found = [*_said(_of_all(config))]
    for section, each in config.by_section().items():
        found += [
            f"{section.removesuffix('.')}: {said}" if section else said for said in _said(_of_one(each))
        ]
    return [*dict.fromkeys(found)] or [*_said([partial(_together, config)])]


def _said(checks: Iterator[Check] | list[Check]) -> Iterator[str]:
    for check in checks:
        try:
            check()
        except (ConfigError, ModelStoreError) as error:
            yield str(error)


def _of_all(config: SlackServeConfig) -> Iterator[Check]:
    yield from (partial(check, config) for check in CHECKS_OF_THIS_MACHINE)
    yield partial(check_ports, config, may_be_taken=True)
    if config.tls is not None:
        yield config.tls.http_options
    yield config.tracing.options
    yield lambda: config.key_source().ring()


def _of_one(config: SlackServeConfig) -> Iterator[Check]:
    """What one model needs: each thing alone as far as it can be asked so, and then all of it."""
    yield partial(check_engine_kwargs, config)
    yield partial(check_ray_names, config)
    if config.profile is not None:
        yield partial(load_profile, config.profile)
    yield partial(find_adapters, config.lora.adapters, config.lora.max_rank, "")
    yield partial(_replicas, config)


def _replicas(config: SlackServeConfig) -> None:
    try:
        model = FoundModel.of(config)
    except EmbeddedModelMissingError:
        check_packages(config)  # those for GPUs lack it: other packages are what is needed then
        raise
    for role in KVRole:
        llm_config(model, role)


def _together(config: SlackServeConfig) -> None:
    """What is asked once each part is right."""
    models = found_models(config)
    sections = config.by_section()
    check_ahead(config, {section: each.resolved for section, each in zip(sections, models, strict=True)})
