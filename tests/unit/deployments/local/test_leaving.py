"""What a node that is about to end waits for; `tests/cluster` leaves real ones."""

import subprocess
from types import SimpleNamespace

import pytest

from deployments.local import leaving

NODE = "the-node"


def actor(name, class_name):
    return SimpleNamespace(name=name, actor_id=f"id of {name}", class_name=class_name)


REPLICA = actor("SERVE_REPLICA::tiny#a", "ServeReplica:slackserve:Decode:tiny")
PROXY = actor("SERVE_PROXY_ACTOR-the-node", "ProxyActor")
OTHERS = [actor("slo-monitor", "SloMonitor"), actor(None, "ServeController")]


@pytest.fixture
def cluster(monkeypatch):
    """A cluster whose node has at each look the actors of the next list in `looks`; the last stays."""
    cluster = SimpleNamespace(looks=[[]], drained=[])

    def list_actors(filters, limit):
        assert ("node_id", "=", NODE) in filters
        return cluster.looks.pop(0) if len(cluster.looks) > 1 else cluster.looks[0]

    def run(command, **_):
        cluster.drained.append(command)
        return subprocess.CompletedProcess(command, 0)

    context = SimpleNamespace(gcs_address="127.0.0.1:6379", get_node_id=lambda: NODE)
    ray = SimpleNamespace(
        init=lambda *_, **__: None, shutdown=lambda: None, get_runtime_context=lambda: context
    )
    monkeypatch.setattr(leaving, "ray", ray)
    monkeypatch.setattr(leaving, "list_actors", list_actors)
    monkeypatch.setattr(leaving.subprocess, "run", run)
    monkeypatch.setattr(leaving.time, "sleep", lambda _: None)
    return cluster


def test_it_waits_for_replicas_and_then_for_the_proxy(cluster):
    cluster.looks = [[REPLICA, PROXY, *OTHERS], [PROXY, *OTHERS], [PROXY, *OTHERS], OTHERS]
    assert leaving.leave(60.0) == []
    assert cluster.looks == [OTHERS]
    assert f"--node-id={NODE}" in cluster.drained[0]


def test_a_proxy_that_stays_is_named_when_the_time_is_over(cluster, monkeypatch):
    cluster.looks = [[REPLICA, PROXY], [PROXY]]
    now_s = iter(range(100))
    monkeypatch.setattr(leaving.time, "monotonic", lambda: float(next(now_s)))
    assert leaving.leave(10.0) == [PROXY.name]
