"""The configuration of the overlay for kind, deployed by `serve deploy` on a Ray that asks for a token.

Each group of pods is a Ray node of its own on this machine, with the labels and the CPUs of its pods.
"""

import grpc
import httpx
import pytest
from manifests import groups, overlay, serve_config
from nodes import Cluster
from ports import free_port, side_channels
from waiting import assert_soon

from deployments.grpc import inference_pb2 as pb
from deployments.grpc.inference_pb2_grpc import InferenceStub
from deployments.local.launcher import get_json

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.embedded, pytest.mark.long]
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def config():
    """The overlay's, with ports that are free here, and one proxy, as all nodes share the machine's ports."""
    values = serve_config(overlay("cpu-kind"))
    values["proxy_location"] = "HeadOnly"
    values["http_options"]["port"] = free_port()
    values["grpc_options"]["port"] = free_port()
    (application,) = values["applications"]
    application["args"]["monitor"]["port"] = free_port()
    application["args"]["kv_transfer"] = side_channels()
    return values


@pytest.fixture(scope="module")
def cluster(config):
    with Cluster() as cluster:
        cluster.start_head()
        for group in groups(overlay("cpu-kind")).values():
            cluster.add_group(group)
        refused = cluster.deploy(config, token="not-the-token-of-this-cluster")
        assert refused.returncode != 0
        assert cluster.get("/api/serve/applications/")["applications"] == {}
        deployed = cluster.deploy(config)
        assert deployed.returncode == 0, deployed.stderr
        ready = f"http://127.0.0.1:{config['http_options']['port']}/ready"
        assert_soon(lambda: (get_json(ready) or {}).get("status") == "ready", 300, "not ready")
        yield cluster


def test_http_and_grpc_answer_alike(cluster, config):
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    url = f"http://127.0.0.1:{config['http_options']['port']}/v1/completions"
    text = httpx.post(url, json=body, timeout=60).json()["choices"][0]["text"]
    assert "Paris" in text
    with grpc.insecure_channel(f"127.0.0.1:{config['grpc_options']['port']}") as channel:
        answer = InferenceStub(channel).Complete(pb.CompleteRequest(**body), timeout=60)
    assert answer.choices[0].text == text


def test_every_replica_is_on_a_node_of_its_tier(cluster):
    nodes = cluster.get("/api/v0/nodes?detail=1&limit=100")["data"]["result"]["result"]
    tiers = {node["node_id"]: node["labels"]["slackserve.io/tier"] for node in nodes}
    (application,) = cluster.get("/api/serve/applications/")["applications"].values()
    found = {
        name: {tiers[replica["node_id"]] for replica in deployment["replicas"]}
        for name, deployment in application["deployments"].items()
    }
    assert found == {
        "Ingress": {"ingress"},
        "Router": {"ingress"},
        f"Prefill:{MODEL}": {"prefill"},
        f"Decode:{MODEL}": {"decode"},
    }


def test_the_monitor_is_on_the_head(cluster):
    nodes = cluster.get("/api/v0/nodes?detail=1&limit=100")["data"]["result"]["result"]
    tiers = {node["node_id"]: node["labels"]["slackserve.io/tier"] for node in nodes}
    actors = cluster.get("/api/v0/actors?detail=1&limit=1000")["data"]["result"]["result"]
    (monitor,) = [actor for actor in actors if actor["class_name"] == "SloMonitor"]
    assert tiers[monitor["node_id"]] == "head"


@pytest.mark.parametrize("authorization", [{}, {"authorization": "Bearer not-the-token-of-this-cluster"}])
def test_without_the_token_ray_tells_nothing(cluster, authorization):
    answer = httpx.get(f"{cluster.dashboard}/api/serve/applications/", headers=authorization)
    assert answer.status_code in (401, 403)
    assert "slackserve" not in answer.text
