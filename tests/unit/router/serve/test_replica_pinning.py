"""A call goes where its request was placed; without that, to the least busy that has not lost it before."""

from types import SimpleNamespace

import pytest

from router.serve.replica_pinning import PinnedPrefill
from slo.request import CONTEXT_HEADER, JobId, ReplicaId, RequestContext
from slo.tiers import STANDARD

A, B, C = (ReplicaId(name) for name in "abc")


@pytest.fixture
def handle():
    """A handle's router that knows how long each replica's queue is."""
    router = PinnedPrefill.__new__(PinnedPrefill)
    router._replica_queue_len_cache = SimpleNamespace(get={A: 1, B: 2, C: 3}.get)
    return router


def replicas(*names):
    return [SimpleNamespace(replica_id=type("Id", (str,), {"unique_id": name})(name)) for name in names]


def call(pin=None, lost=()):
    context = RequestContext(
        JobId("job"), "request", STANDARD, None, prefill_replica=pin, failed_replicas=lost
    )
    info = SimpleNamespace(headers={CONTEXT_HEADER: context.encode()})
    routing = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(args=["prompt", info], kwargs={}, routing_context=routing)


async def choice(handle, request, *names):
    (ranked,) = await handle.choose_replicas(replicas(*names), request)
    return [replica.replica_id for replica in ranked]


async def test_a_placed_request_goes_to_its_replica_alone(handle):
    assert await choice(handle, call(pin=B), A, B, C) == [B]
    assert await choice(handle, call(), A, B, C) == [A, B, C]


async def test_when_that_is_gone_it_goes_to_the_least_busy(handle):
    assert await choice(handle, call(pin=B), C, A) == [A, C]


async def test_replicas_that_lost_it_are_avoided_if_there_is_another(handle):
    assert await choice(handle, call(lost=(A,)), A, B, C) == [B, C]
    assert await choice(handle, call(lost=(A,)), A) == [A]


async def test_a_message_for_one_replica_goes_there(handle):
    message = SimpleNamespace(args=["job"], kwargs={"pin": C}, routing_context=SimpleNamespace())
    assert await choice(handle, message, A, B, C) == [C]
