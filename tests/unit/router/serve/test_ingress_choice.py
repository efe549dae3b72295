"""What a proxy keeps of requests whose clients name a model to Serve: nothing."""

import logging
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from router.serve.ingress_choice import AnyIngress

DEPLOYMENT = DeploymentID("Ingress", "slackserve")
REQUESTS = 200


class Ingress(SimpleNamespace):
    """One of two that have nothing to do."""

    async def get_queue_len(self, *, deadline_s):
        return 0


@pytest.fixture
async def router():
    # As a proxy has it: by value, from what the application was deployed with.
    chosen = RequestRouterConfig(request_router_class=AnyIngress).get_request_router_class()
    router = chosen(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.PROXY,
        self_actor_handle="proxy",
    )
    router.update_replicas(
        [
            Ingress(
                replica_id=ReplicaID(name, DEPLOYMENT),
                node_id="node",
                availability_zone=None,
                multiplexed_model_ids=set(),
                max_ongoing_requests=100,
                push_proxy_handle=logging.debug,
            )
            for name in "ab"
        ]
    )
    return router


async def test_no_model_that_a_client_names_is_kept_and_no_request(router):
    for number in range(REQUESTS):
        metadata = RequestMetadata(
            request_id="r", internal_request_id=str(number), multiplexed_model_id=f"model-{number}"
        )
        await router._choose_replica_for_request(
            PendingRequest(args=[b"scope"], kwargs={}, metadata=metadata)
        )
    assert not router._pending_requests_by_model_id
    assert not router._multiplexed_model_id_fallback_match
    assert not router._pending_requests_by_id
