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
    cluster = SimpleNamespace(looks=[[]], drained=[], codes=[], away=[], dashboard="127.0.0.1:8265")

    def list_actors(filters, limit):
        assert ("node_id", "=", NODE) in filters
        look = cluster.looks.pop(0) if len(cluster.looks) > 1 else cluster.looks[0]
        if isinstance(look, Exception):
            raise look
        return look

    def run(command, **_):
        cluster.drained.append(command)
        code = cluster.codes.pop(0) if cluster.codes else 0
        return subprocess.CompletedProcess(command, code, "", "it does not want to")

    def init(*_, **__):
        if cluster.away:
            raise cluster.away.pop(0)
        return SimpleNamespace(dashboard_url=cluster.dashboard)

    context = SimpleNamespace(gcs_address="127.0.0.1:6379", get_node_id=lambda: NODE)
    ray = SimpleNamespace(init=init, shutdown=lambda: None, get_runtime_context=lambda: context)
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


AWAY = ConnectionError("Could not read 'dashboard' from GCS. Did GCS start successfully?")


def test_a_head_that_is_away_for_a_while_is_waited_for(cluster, monkeypatch):
    """What the node serves goes on without it, and would be cut if this gave up."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    cluster.away = [ConnectionError("no answer"), RuntimeError("no GCS")]
    cluster.codes = [1, 0]
    cluster.looks = [AWAY, [REPLICA, PROXY], AWAY, ValueError("no dashboard"), [PROXY], OTHERS]
    assert leaving.leave(60.0) == []
    assert len(cluster.drained) == 2


def test_a_head_that_stays_away_is_told(cluster, monkeypatch):
    cluster.looks = [[REPLICA], AWAY]
    now_s = iter(range(1000))
    monkeypatch.setattr(leaving.time, "monotonic", lambda: float(next(now_s)))
    with pytest.raises(leaving.LeaveError, match="head does not say what is on node"):
        leaving.leave(600.0)


def test_a_refusal_is_told_at_once(cluster):
    cluster.codes = [1, 1]
    with pytest.raises(leaving.LeaveError, match="does not drain node the-node: it does not want to"):
        leaving.leave(60.0)
    assert len(cluster.drained) == 1


def test_where_no_ray_runs_nobody_waits_for_it(cluster, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster.away = [ConnectionError("Could not find any running Ray instance. Please specify")] * 2
    with pytest.raises(leaving.LeaveError, match="no Ray cluster to leave"):
        leaving.leave(60.0)
    assert len(cluster.away) == 1


def test_a_cluster_without_a_dashboard_is_told_at_once_and_no_other_is_asked(cluster):
    """As that of `slackserve serve`; Ray's GCS names the usual port for it, where another's may listen."""
    cluster.dashboard = ""
    cluster.looks = [AssertionError("asked")]
    with pytest.raises(leaving.LeaveError, match="has no dashboard, which says what a node has"):
        leaving.leave(60.0)
    assert cluster.drained == []


def test_a_dashboard_that_a_new_head_has_not_started_yet_is_waited_for(cluster):
    cluster.dashboard = None
    cluster.looks = [[REPLICA, PROXY], OTHERS]
    assert leaving.leave(60.0) == []
