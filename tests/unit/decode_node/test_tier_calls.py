"""What is known of a replica that is asked whether it is there."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from decode_node.prefill_tier import PrefillTier
from decode_node.tier_calls import TierCalls
from slo.replacement import FailureCause
from slo.request import ReplicaId
from telemetry.reporting.background import Background

REPLICA = ReplicaId("a")


class Handle:
    """A deployment handle: of the replica that is asked, and of how many replicas Serve knows."""

    def __init__(self, answer, known):
        self._answer = answer
        self._known = known
        self.is_up = SimpleNamespace(remote=self._is_up)

    def options(self, *, stream):
        assert not stream
        return self

    async def _is_up(self, pin):
        assert pin == REPLICA
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer == "silence":
            await asyncio.Event().wait()
        return self._answer

    def broadcast(self, method):
        assert method == "is_up"

        async def sent():
            return [SimpleNamespace()] * self._known

        return SimpleNamespace(_fetch_replica_results_async=sent)


@pytest.mark.parametrize(
    ("answer", "known", "cause"),
    [
        (REPLICA, 1, None),
        ("another", 1, None),
        (None, 1, FailureCause.ENGINE_DIED),
        (RayActorError(), 0, FailureCause.REPLICA_DIED),
        ("silence", 0, FailureCause.NO_REPLICA),
    ],
)
async def test_what_a_replica_says_or_serve_says_for_it(answer, known, cause):
    assert await PrefillTier(Handle(answer, known), Background()).ask(REPLICA) is cause


@pytest.mark.parametrize(
    "tier",
    [PrefillTier(Handle("silence", 1), Background()), TierCalls(Handle("silence", 0))],
    ids=["prefill", "decode"],
)
async def test_whoever_may_still_answer_is_waited_for(tier):
    """A decode replica that drains is not known to Serve any more, and its streams go on."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(tier.ask(REPLICA), 1.0)
