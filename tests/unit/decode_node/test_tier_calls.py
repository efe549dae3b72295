"""What is known of a replica that is asked whether it is there."""

import asyncio
from concurrent.futures import Future as ConcurrentFuture
from functools import partial
from types import SimpleNamespace

import pytest
from played_calls import call_until
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from decode_node import tier_calls
from decode_node.prefill_tier import PrefillTier
from decode_node.tier_calls import TierCalls, cancel_call, is_accepted
from deployments.http.continuing.stream_watch import DecodeFailedError, StreamWatch
from slo.replacement import FailureCause
from slo.request import ReplicaId
from telemetry.reporting.background import Background

REPLICA = ReplicaId("a")


class Handle:
    """A deployment handle: of the replica that is asked, and of how many replicas Serve knows."""

    def __init__(self, answer, known):
        self._answer = answer
        self._is_answered = asyncio.Event()
        if answer != "silence":
            self._is_answered.set()
        self._known = known
        self.broadcasts = 0
        self.is_up = SimpleNamespace(remote=self._is_up)

    def answers(self, answer):
        self._answer, self._known = answer, 1
        self._is_answered.set()

    def options(self, *, stream):
        assert not stream
        return self

    async def _is_up(self, pin):
        assert pin == REPLICA
        if isinstance(self._answer, Exception):
            raise self._answer
        await self._is_answered.wait()
        return self._answer

    def broadcast(self, method):
        assert method == "is_up"
        self.broadcasts += 1

        async def sent():
            await asyncio.sleep(0)
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
    assert await TierCalls(Handle(answer, known)).ask(REPLICA) is cause


@pytest.mark.parametrize(
    "tier",
    [PrefillTier(Handle("silence", 1), Background()), TierCalls(Handle("silence", 1))],
    ids=["prefill", "decode"],
)
async def test_whoever_may_still_answer_is_waited_for(tier):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(tier.ask(REPLICA), 1.0)


async def test_all_who_wait_for_silent_replicas_look_once_whether_there_are_any(monkeypatch):
    """It takes a call of each: by each who waits, that would be the square of the tier, when it is slow."""
    monkeypatch.setattr(tier_calls, "_UP_S", 0.01)
    monkeypatch.setattr(tier_calls, "_KNOWN_S", 60.0)
    handle = Handle("silence", 0)
    tier = PrefillTier(handle, Background())
    for _ in range(2):
        assert await asyncio.gather(*(tier.ask(REPLICA) for _ in range(8))) == [FailureCause.NO_REPLICA] * 8
    assert handle.broadcasts == 1
    monkeypatch.setattr(tier_calls, "_KNOWN_S", 0.0)
    assert await tier.ask(REPLICA) is FailureCause.NO_REPLICA
    assert handle.broadcasts == 2


@pytest.mark.parametrize("known", [0, 2])
async def test_how_many_replicas_serve_knows_of(known):
    assert await TierCalls(Handle(REPLICA, known)).known() == known


async def test_one_who_asks_no_longer_takes_no_answer_from_the_others(monkeypatch):
    monkeypatch.setattr(tier_calls, "_UP_S", 0.01)
    looks, may_look = asyncio.Event(), asyncio.Event()

    class Slow(TierCalls):
        async def sent(self, method, *args):
            looks.set()
            await may_look.wait()
            return await super().sent(method, *args)

    tier = Slow(Handle("silence", 0))
    first, second = (asyncio.create_task(tier.ask(REPLICA)) for _ in range(2))
    await asyncio.wait_for(looks.wait(), 5)
    first.cancel()
    may_look.set()
    assert await asyncio.wait_for(second, 5) is FailureCause.NO_REPLICA
    assert first.cancelled()


@pytest.mark.parametrize(("known", "cause"), [(0, None), (1, FailureCause.SILENT)])
async def test_the_last_decode_replica_is_not_silent_for_draining(known, cause):
    """Serve does not know it any more and keeps the question, while it answers whom it has."""

    async def whole_answer():
        await asyncio.sleep(2.0)
        yield "answer"

    watch = StreamWatch(TierCalls(Handle("silence", known)).ask, 0.01, 0.8)
    try:
        assert [piece async for piece in watch.pieces(whole_answer(), REPLICA)] == ["answer"]
        found = None
    except DecodeFailedError as failed:
        found = failed.cause
    assert found is cause


@pytest.mark.parametrize("knows_again", [True, False])
async def test_a_request_that_nobody_has_accepted_does_not_wait_for_a_replica(monkeypatch, knows_again):
    """Serve would keep it for the next one that there is."""
    monkeypatch.setattr(tier_calls, "_UP_S", 0.01)
    monkeypatch.setattr(tier_calls, "_KNOWN_S", 0.01)
    handle = Handle("silence", 0)
    call = call_until(asyncio.get_running_loop().create_future())
    pieces = StreamWatch(TierCalls(handle).ask, 0.01, 0.4).pieces(
        call, REPLICA, is_accepted=partial(is_accepted, call)
    )
    reading = asyncio.create_task(anext(pieces))
    await asyncio.sleep(0.2)
    assert not reading.done(), "the handle may not have heard of the replica yet"
    if knows_again:
        handle.answers(REPLICA)
    done, _ = await asyncio.wait([reading], timeout=1.0)
    assert bool(done) != knows_again
    if done:
        assert isinstance(failed := reading.exception(), DecodeFailedError)
        assert (failed.cause, failed.replica) == (FailureCause.NO_REPLICA, REPLICA)
    reading.cancel()
    await asyncio.wait([reading])


class Fleet:
    """A deployment handle of replicas that each answer after a time, or fail."""

    def __init__(self, *answers):
        self._answers = answers

    def broadcast(self, method):
        assert method == "is_up"

        async def answered(after_s, answer):
            await asyncio.sleep(after_s)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        async def sent():
            return [SimpleNamespace(get_async=partial(answered, *answer)) for answer in self._answers]

        return SimpleNamespace(_fetch_replica_results_async=sent)


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ([], FailureCause.NO_REPLICA),
        ([(0, RayActorError()), (0, None)], FailureCause.NO_REPLICA),
        ([(0, RayActorError()), (60, REPLICA), (0, REPLICA)], None),
        ([(0, RayActorError()), (1.2, REPLICA)], None),
        ([(0, asyncio.CancelledError()), (0.1, REPLICA)], None),
    ],
    ids=["none", "all failed", "one is up", "one is late", "one was cancelled"],
)
async def test_whether_there_is_any_replica(answers, cause):
    assert await asyncio.wait_for(TierCalls(Fleet(*answers)).ask(None), 2.0) is cause


async def test_replicas_that_are_late_are_not_gone():
    """As those of a crowd: who asked decides how long that is borne, and calls it silence."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(TierCalls(Fleet((60, REPLICA))).ask(None), 1.2)


class Result:
    """What a replica has of a call that it has accepted."""

    def __init__(self):
        self.cancelled = 0

    async def __anext__(self):
        await asyncio.Event().wait()

    def cancel(self):
        self.cancelled += 1


@pytest.mark.parametrize("is_heard_of", [True, False])
async def test_a_call_is_cancelled_whether_or_not_its_caller_has_heard_that_it_is_accepted(is_heard_of):
    accepted, result = asyncio.get_running_loop().create_future(), Result()
    call = call_until(accepted)
    asking = asyncio.create_task(anext(call))
    await asyncio.sleep(0)
    accepted.set_result(result)
    if is_heard_of:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    cancel_call(call)
    assert result.cancelled == 1


@pytest.mark.parametrize("in_its_own_loop", [True, False], ids=["a loop for the router", "one loop"])
async def test_a_call_that_waits_for_a_replica_is_cancelled_and_one_that_has_found_none_has_ended(
    in_its_own_loop,
):
    new = ConcurrentFuture if in_its_own_loop else asyncio.get_running_loop().create_future
    waiting, failed = new(), new()
    failed.set_exception(DeploymentUnavailableError(DeploymentID("decode")))
    for _ in range(2):
        for accepted in (failed, waiting):
            cancel_call(call_until(accepted))
        assert waiting.cancelled()
