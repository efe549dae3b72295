"""Serving goes on without the router."""

import time

import pytest
import ray
from waiting import assert_soon, at_rest

pytestmark = pytest.mark.e2e


@pytest.fixture
def router_actor(deployment):
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    actors = ray.util.list_named_actors(all_namespaces=True)
    yield next(actor for actor in actors if "Router#" in actor["name"])
    ray.shutdown()


def ask(client):
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="hello " * 50, max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert raw.parse().usage.completion_tokens == 2
    return "x-slo-predicted-ttft-ms" in raw.headers


def test_requests_are_served_while_the_router_is_gone_and_placed_again_when_it_is_back(
    deployment, router_actor
):
    client = deployment.client()
    assert ask(client), "placed by the router"
    ray.kill(ray.get_actor(router_actor["name"], namespace=router_actor["namespace"]), no_restart=True)
    started_s = time.monotonic()
    placed = []
    while time.monotonic() - started_s < 60 and not (False in placed and placed[-5:] == [True] * 5):
        placed.append(ask(client))
    assert False in placed, "no request had to do without the router"
    assert placed[-5:] == [True] * 5, "the router did not come back"
    assert_soon(lambda: deployment.metric("slackserve_router_fallbacks_total") > 0, 30)
    assert_soon(lambda: at_rest(deployment), 10)
