"""What a decode replica makes of what a call to the prefill tier ends with."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RequestCancelledError

from decode_node.prefill_health import PrefillFailedError
from decode_node.prefill_tier import PrefillTier
from slo.replacement import FailureCause
from slo.request import JobId, ReplicaId, RequestContext
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


async def test_a_cancelled_prefill_has_not_failed():
    with pytest.raises(RequestCancelledError):
        await failing(RequestCancelledError("r"))
