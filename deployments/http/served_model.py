"""What an ingress has for each model that it serves: the way to its replicas, and its word to the monitor.

Models share nothing here: one whose router's view, decode tier or policy is in trouble leaves the others
alone. Owns which of them a request means.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve

from decode_node.tier_calls import TierCalls
from deployments.http import errors as http_errors
from deployments.http.continuing.decode_tier import DecodeTier
from deployments.http.continuing.stream_watch import StreamWatch
from deployments.http.model_config import ModelConfig
from deployments.http.placing.placement_client import PlacementClient
from deployments.http.placing.readiness import Fleets, RecentFleets
from deployments.monitor.actor import IngressMonitor, MonitorOptions
from slo.monitor.messages import IngressSeen, Role
from slo.outcomes import RequestEnded
from telemetry.instruments import Instruments
from telemetry.reporting.monitor_client import MonitorClient, Participant
from telemetry.reporting.of_model import OfModel

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


@dataclass(frozen=True, slots=True)
class WaysConfig:
    """How the ingress goes to the replicas of every model.

    Attributes:
        router_timeout_s: Longest wait for the router's answer.
        max_replacements: How often one request is placed again.
        monitor: None means no SLO monitor.
    """

    router_timeout_s: float
    max_replacements: int = 0
    monitor: MonitorOptions | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, as the ingress serves it.

    Attributes:
        config: The model and its limits.
        placement: Says where its requests go.
        decode: Gets their answers.
        monitor: Is told how they end; None for no monitor.
    """

    config: ModelConfig
    placement: PlacementClient
    decode: DecodeTier
    monitor: MonitorClient | None

    @classmethod
    def started(
        cls,
        config: ModelConfig,
        ways: WaysConfig,
        router: DeploymentHandle,
        replicas: DeploymentHandle,
        instruments: Instruments,
    ) -> ServedModel:
        """Make a model's way to its replicas, and its client of the SLO monitor.

        The monitor hears of this ingress from `announce` on; the client starts the monitor if there is none.

        Args:
            config: The model and its limits.
            ways: How to go to its replicas.
            router: The router of all models.
            replicas: Its decode tier.
            instruments: Where requests are counted.
        """
        placement = PlacementClient(OfModel(router, config.name), ways.router_timeout_s, instruments)
        placement.start()
        calls = TierCalls(replicas)
        watch = StreamWatch(calls.ask, known=calls.known)
        decode = DecodeTier(placement, watch, ways.max_replacements, instruments)
        monitor = None
        if ways.monitor is not None:
            participant = Participant(
                serve.get_replica_context().replica_id.unique_id,
                Role.INGRESS,
                _seen,
                settings=ways.monitor.settings[config.name],
                model=config.name,
            )
            monitor = MonitorClient(participant, instruments, IngressMonitor(ways.monitor).find)
        return cls(config, placement, decode, monitor)

    def announce(self) -> None:
        """Inform the monitor of it from now on."""
        if self.monitor is not None:
            self.monitor.start()

    def tell(self, ended: RequestEnded) -> None:
        """Let the monitor know of a request that has ended."""
        if self.monitor is not None:
            self.monitor.note((time.monotonic(), ended))


def _seen(events: tuple[tuple[float, RequestEnded], ...]) -> IngressSeen:
    """What to report of requests and when they have ended, which may be minutes ago."""
    now_s = time.monotonic()
    return IngressSeen(tuple(ended for _, ended in events), tuple(now_s - at_s for at_s, _ in events))


class ServedModels:
    """All models of an ingress.

    Args:
        models: All that are served; the first answers requests that name none.
        names: By name that a request may have, the name of the model.
    """

    def __init__(self, models: Sequence[ServedModel], names: Mapping[str, str]) -> None:
        self._models = tuple(models)
        served_as = {served.config.name: served for served in models}
        self._by_name = {name: served_as[model] for name, model in names.items()}
        self._fleets = RecentFleets(self._ask_for_fleets)

    def announce(self) -> None:
        """Inform the monitor of them from now on."""
        for served in self._models:
            served.announce()

    def named_by(self, body: Any) -> ServedModel:
        """The model that a request names; from now on one names it that has named none.

        Raises:
            HTTPError: 404 when it is not served.
        """
        if not body.model:
            body.model = self._models[0].config.name
        self.check(body.model)
        return self._by_name[body.model]

    def check(self, name: str) -> None:
        """Make sure that a name is one of a model.

        Raises:
            HTTPError: 404 when it is not.
        """
        if name not in self._by_name:
            raise http_errors.unknown_model(name, list(self._by_name))

    async def fleets(self) -> Fleets:
        """What the router says, or has just said, of each model's replicas; None where it does not answer."""
        return await self._fleets.get()

    async def _ask_for_fleets(self) -> Fleets:
        return await asyncio.gather(*(served.placement.fleet() for served in self._models))
