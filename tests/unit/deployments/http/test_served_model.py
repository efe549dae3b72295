"""What an ingress has for each model: when its monitor gets the port for metrics."""

from types import SimpleNamespace

import pytest

from deployments.http import served_model
from deployments.http.model_config import ModelConfig
from deployments.http.served_model import ServedModel, WaysConfig
from deployments.monitor import actor
from deployments.monitor.actor import MonitorOptions
from slo.monitor.messages import IngressSeen
from slo.monitor.settings import MonitorSettings
from slo.outcomes import Outcome, RequestEnded
from slo.tiers import PREMIUM

CONTEXT = SimpleNamespace(app_name="app", replica_id=SimpleNamespace(unique_id="ingress"))


class Cluster:
    """Ray with one monitor, which notes for whom it is to leave its port; it may not be there."""

    def __init__(self):
        self.left_to, self.is_away = [], False
        self.monitor = SimpleNamespace(export_by=SimpleNamespace(remote=self.left_to.append))

    def remote(self, _):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, *_):
        if self.is_away:
            raise ConnectionError("the head is away")
        return self.monitor


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    serve = SimpleNamespace(get_replica_context=lambda: CONTEXT)
    monkeypatch.setattr(actor, "ray", cluster)
    monkeypatch.setattr(actor, "monitors_of", lambda _: iter([cluster.monitor]))
    for module in (actor, served_model):
        monkeypatch.setattr(module, "serve", serve)
    return cluster


@pytest.fixture
def find(cluster, monkeypatch):
    """How an ingress finds its monitor, each time that it has to."""
    finds = []
    monkeypatch.setattr(served_model, "MonitorClient", lambda *told: finds.append(told[-1]))
    monkeypatch.setattr(served_model, "PlacementClient", lambda *_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(served_model, "TierCalls", lambda _: SimpleNamespace(ask=None, known=None))
    ways = WaysConfig(1.0, monitor=MonitorOptions({"tiny": MonitorSettings()}))
    ServedModel.started(
        ModelConfig("tiny", None, None, {}, shows_usage=False),
        ways,
        SimpleNamespace(),
        SimpleNamespace(),
        None,
    )
    return finds[0]


def test_a_monitor_that_is_found_again_does_not_get_the_port_again(find, cluster):
    """As by an ingress that drains: the port is that of the ingress that started after it."""
    assert find() is cluster.monitor
    assert find() is cluster.monitor
    assert cluster.left_to == [actor.monitor_name("app")]


def test_a_monitor_that_is_found_late_gets_the_port(find, cluster):
    cluster.is_away = True
    with pytest.raises(ConnectionError):
        find()
    cluster.is_away = False
    find()
    assert cluster.left_to == [actor.monitor_name("app")]


async def test_what_could_not_be_told_is_told_with_its_age(monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(served_model, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    participants = []
    monkeypatch.setattr(served_model, "serve", SimpleNamespace(get_replica_context=lambda: CONTEXT))
    monkeypatch.setattr(served_model, "PlacementClient", lambda *_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(served_model, "TierCalls", lambda _: SimpleNamespace(ask=None, known=None))
    noted = []

    def client(participant, *_):
        participants.append(participant)
        return SimpleNamespace(note=noted.append)

    monkeypatch.setattr(served_model, "MonitorClient", client)
    config = ModelConfig("tiny", None, None, {}, shows_usage=False)
    ways = WaysConfig(1.0, monitor=MonitorOptions({"tiny": MonitorSettings()}))
    served = ServedModel.started(config, ways, SimpleNamespace(), SimpleNamespace(), None)
    ended = [RequestEnded("tiny", PREMIUM, "acme", Outcome.FINISHED, e2e_s) for e2e_s in (1.0, 2.0)]
    for each in ended:
        served.tell(each)
        clock.now_s += 90.0
    (participant,) = participants
    assert participant.seen(tuple(noted)) == IngressSeen(tuple(ended), (180.0, 90.0))
    clock.now_s += 10.0
    assert participant.seen(tuple(noted)).ages_s == (190.0, 100.0), "it is told again later"
    assert participant.seen(()).is_quiet
