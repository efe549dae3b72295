"""Exports what the SLO monitor knows to Prometheus, on a port of its own.

Owns the translation of a monitor's state into the series of `telemetry.catalogue.MONITOR`, and the HTTP
server. Scrapes run in a thread of their own and see the series of the last look.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer

from slo.monitor.attainment import Attainment, Series
from slo.monitor.core import MonitorCore, MonitorState
from slo.monitor.messages import Role
from telemetry import catalogue
from telemetry.catalogue import Metric, MetricKind

if TYPE_CHECKING:
    Sample = tuple[Metric, tuple[str, ...], float]

_LOGGER: Final = logging.getLogger("slackserve.monitor")
MOST_CONNECTIONS: Final = 32
"""Beyond it the oldest is closed: a scrape takes milliseconds, and each connection a thread."""


class _Handler(WSGIRequestHandler):
    """Answers one request, and waits for no client that goes on neither asking nor reading."""

    timeout = 5

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Log nothing: what a client has sent makes no line."""


class _Server(ThreadingWSGIServer):
    """Answers each connection in a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        (self.address_family, *_, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self._held: dict[Any, None] = {}
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        while len(held := list(self._held)) >= MOST_CONNECTIONS:
            self._held.pop(held[0], None)
            with suppress(OSError):  # its thread may have closed it meanwhile
                held[0].shutdown(socket.SHUT_RDWR)
        self._held[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._held.pop(request, None)
        super().shutdown_request(request)


class Exporter:
    """Serves the latest series under `/metrics`; port 0 exports nothing."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._wanted = host, port
        self._at = host, 0
        self._server: Any = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._samples: tuple[Sample, ...] = ()
        self.refused = ""
        """Why nothing is exported; empty when all is well."""

    @property
    def port(self) -> int:
        """Where it is listened now; 0 for nowhere."""
        return self._at[1]

    def move(self, host: str, port: int) -> None:
        """Export there from the next `open` on, and no more where it is done now."""
        self._wanted = host, port

    def open(self) -> bool:
        """Listen if that is wanted and not done yet; the port may have been busy the last time.

        Returns whether it listens from now on, and so has nothing to show yet.
        """
        if self._at == self._wanted:
            return False
        self.close()
        host, port = self._wanted
        if port:
            try:
                self._server = _Server(host, port)
            except (OSError, UnicodeError) as error:  # the latter where it is not even the form of a name
                if str(error) != self.refused:
                    self.refused = str(error)
                    _LOGGER.warning("metrics_not_exported %s:%d %s", host, port, error)
                return False
            self._server.set_app(make_wsgi_app(self._registry))
            threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
            _LOGGER.info("metrics_exported %s:%d", host, port)
        self._at, self.refused = self._wanted, ""
        return port > 0

    def close(self) -> None:
        """Listen no more, until the next `open`."""
        if self._server is not None:
            _LOGGER.info("metrics_not_exported_any_more %s:%d", *self._at)
            self._server.shutdown()
            self._server.server_close()
            self._server, self._at, self._samples = None, (self._at[0], 0), ()

    def show(self, cores: Mapping[str, MonitorCore], now_s: float) -> None:
        """Export this from now on, of each model."""
        if self.port:
            self._samples = tuple(
                sample for model, core in cores.items() for sample in samples(model, core, now_s)
            )

    def collect(self) -> Iterator[Any]:
        """Metric families, called by prometheus_client."""
        families: dict[str, Any] = {}
        for metric, labels, value in self._samples:
            if metric.name not in families:
                kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
                families[metric.name] = kind(metric.name, metric.meaning, labels=metric.labels)
            families[metric.name].add_metric(labels, value)
        yield from families.values()


def samples(model: str, core: MonitorCore, now_s: float) -> Iterator[Sample]:
    """Everything that is exported of a model, with label values in the catalogue's order."""
    state = core.state(now_s)
    yield from _tiers(model, state)
    for series, attainment in core.series(now_s).items():
        yield from _series(series, attainment)
    for judged, count in core.judgements().items():
        labels = (judged.model, model, judged.tier, judged.objective, "yes" if judged.met else "no")
        yield catalogue.SLO_JUDGED, labels, count
    yield from _policy(model, state)
    yield from _replicas(core, state)
    if state.ttft_error is not None:
        yield catalogue.FIRST_TOKEN_ERROR, (model, "mape"), state.ttft_error.mape
        yield catalogue.FIRST_TOKEN_ERROR, (model, "p90"), state.ttft_error.p90
    for role in Role:
        yield catalogue.SUBSCRIBERS, (model, role.value), state.subscribers.get(role, 0)
    demand = core.demand(now_s)
    used = (0, 0) if demand is None else (demand.prefill.replicas, demand.decode.replicas)
    for role, replicas in zip((Role.PREFILL, Role.DECODE), used, strict=True):
        yield catalogue.REPLICAS_USED, (model, role.value), replicas
    yield catalogue.SUBSCRIBERS_BEHIND, (model,), state.behind
    yield catalogue.REPORTS_DROPPED, (model,), core.dropped
    for decision, counts in (("placed", core.placed), ("refused", core.refused)):
        for tier in state.tiers:
            total = sum(count for (each, _), count in counts.items() if each == tier)
            yield catalogue.ROUTED, (model, tier, decision), total
    for steered, count in core.steered.items():
        yield catalogue.POLICY_CHANGES, (model, steered.value), count
    for directed, count in core.directed.items():
        yield catalogue.DIRECTED, (model, directed.value), count


def _tiers(model: str, state: MonitorState) -> Iterator[Sample]:
    for tier, each in state.tiers.items():
        yield catalogue.SLO_TARGET, (model, tier), each.target
        for window, attainment, burn, in_reach in (
            ("short", each.short, each.burn.short, each.burn_in_reach.short),
            ("long", each.long, each.burn.long, each.burn_in_reach.long),
        ):
            labels = (model, tier, window)
            yield catalogue.SLO_BURN, labels, burn.rate
            yield catalogue.SLO_BURN_IN_REACH, labels, in_reach.rate
            yield catalogue.SLO_GOODPUT, labels, attainment.goodput_per_s
            if attainment.ratio is not None:
                yield catalogue.SLO_ATTAINMENT, labels, attainment.ratio
            if attainment.headroom is not None:
                yield catalogue.SLO_HEADROOM, labels, attainment.headroom


def _series(series: Series, attainment: Attainment) -> Iterator[Sample]:
    labels = (series.model, series.tier, series.tenant)
    yield catalogue.SLO_REQUESTS, labels, attainment.requests
    if attainment.ratio is not None:
        yield catalogue.SLO_SERIES_ATTAINMENT, labels, attainment.ratio
    for latency in ("ttft", "tpot", "e2e"):
        if (spread := getattr(attainment, latency)) is not None:
            for quantile, value in zip(("0.5", "0.95", "0.99"), spread, strict=True):
                yield catalogue.SLO_LATENCY, (*labels, latency, quantile), value


def _replicas(core: MonitorCore, state: MonitorState) -> Iterator[Sample]:
    for replica, error in core.errors().items():
        yield catalogue.CORRECTION, (replica,), state.corrections[replica]
        if error is not None:
            yield catalogue.PREDICTION_ERROR, (replica, "mape"), error.mape
            yield catalogue.PREDICTION_ERROR, (replica, "p90"), error.p90


def _policy(model: str, state: MonitorState) -> Iterator[Sample]:
    policy = state.policy
    yield catalogue.POLICY_VERSION, (model,), policy.version
    yield catalogue.RESERVED, (model,), policy.reserved
    for tier in state.tiers:
        yield catalogue.SHED_LEVEL, (model, tier), policy.shed_level(tier)
    if policy.margin is not None:
        yield catalogue.POLICY_MARGIN, (model,), policy.margin
