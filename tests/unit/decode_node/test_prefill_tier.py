"""What a decode replica makes of what a call to the prefill tier ends with."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from played_calls import call_until
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RequestCancelledError
from ray.serve.llm.openai_api_models import ErrorResponse

from decode_node.prefill_health import PrefillFailedError
from decode_node.prefill_tier import PrefillTier
from slo.model_digest import OTHER_MODEL
from slo.replacement import FailureCause
from slo.request import ENGINE_DIED, JobId, ReplicaId, RequestContext
from slo.tiers import STANDARD
from telemetry.reporting.background import Background

REPLICA = ReplicaId("a")
CONTEXT = RequestContext(JobId("j"), "r", STANDARD, 2.0, prefill_replica=REPLICA)
NO_ADAPTER = RuntimeError("the prefill replica has no LoRA adapter")


class Info:
    """A request's headers."""

    def __init__(self, headers):
        self.headers = headers


def failing(error):
    """The prefill tier, whose replica ends a prefill with an error."""

    async def prefill(request, info):
        raise error
        yield

    handle = SimpleNamespace(prefill=SimpleNamespace(remote=prefill))
    return PrefillTier(handle, Background()).prefill(None, Info({}), CONTEXT)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (NO_ADAPTER, FailureCause.REQUEST_FAILED),
        (RayTaskError("prefill", "", NO_ADAPTER), FailureCause.REQUEST_FAILED),
        (RayActorError(), FailureCause.REPLICA_DIED),
    ],
    ids=["own, over gRPC", "own", "gone"],
)
async def test_a_failed_prefill_may_be_placed_again(error, cause):
    with pytest.raises(PrefillFailedError) as failed:
        await failing(error)
    assert (failed.value.cause, failed.value.replica) == (cause, REPLICA)


@pytest.mark.parametrize(
    ("kind", "cause"), [(OTHER_MODEL, FailureCause.OTHER_MODEL), (ENGINE_DIED, FailureCause.ENGINE_DIED)]
)
async def test_a_replica_that_cannot_compute_it_says_who_it_is(kind, cause):
    """Where Serve has chosen it nobody knows."""

    async def prefill(request, info):
        yield ErrorResponse(error={"message": "no", "type": kind, "param": "b", "code": 503})

    tier = PrefillTier(SimpleNamespace(prefill=SimpleNamespace(remote=prefill)), Background())
    with pytest.raises(PrefillFailedError) as failed:
        await tier.prefill(None, Info({}), replace(CONTEXT, prefill_replica=None))
    assert (failed.value.cause, failed.value.replica) == (cause, "b")


async def test_a_cancelled_prefill_has_not_failed():
    with pytest.raises(RequestCancelledError):
        await failing(RequestCancelledError("r"))


async def test_a_prefill_that_is_accepted_just_as_it_is_cancelled_ends_there_too():
    accepted, ended = asyncio.get_running_loop().create_future(), []
    handle = SimpleNamespace(prefill=SimpleNamespace(remote=lambda *_: call_until(accepted)))
    asking = asyncio.create_task(PrefillTier(handle, Background()).prefill(None, Info({}), CONTEXT))
    await asyncio.sleep(0)
    accepted.set_result(SimpleNamespace(cancel=lambda: ended.append(REPLICA)))
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert ended == [REPLICA]
