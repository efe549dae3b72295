"""An ingress goes on without a router that is gone or slow."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest

from deployments.http.placing import placement_client
from deployments.http.placing.placement_client import PlacementClient
from router.messages import JobEnded, Placed, PlacementReason, PlacementRequested
from slo.admission.tenant_limits import Usage
from slo.errors import Rejected, RejectionReason
from slo.objectives import Objective
from slo.request import JobId, ReplicaId
from slo.tiers import STANDARD
from telemetry.reporting import background

TIMEOUT_S = 0.05
AT_ONCE = 300
HERE = Placed(ReplicaId("p"), ReplicaId("d"), 10, None, 0.1, 1.0, 0.0, PlacementReason.ONLY_REPLICA)


class Method:
    def __init__(self, play):
        self.play = play
        self.calls = 0

    def remote(self, *arguments):
        self.calls += 1
        return self.play(*arguments)


class Router:
    """Answers with what it is told to, as a Serve handle does."""

    def __init__(self, place):
        self.place = Method(place)


class Counts(dict):
    def count(self, _, cause):
        self[cause] = self.get(cause, 0) + 1


def answering(decision):
    async def play(*_):
        return decision

    return play


async def hanging(*_):
    await asyncio.Event().wait()


async def dying(*_):
    raise ConnectionError("the router's process has ended")


def request():
    return PlacementRequested(JobId("job"), Objective(STANDARD, 1.0, None), False, 10, 0)


async def place(client):
    started_s = time.monotonic()
    decision = await client.place(request())
    return decision, time.monotonic() - started_s


async def waits_in_vain():
    """What `AT_ONCE` plain waits of `TIMEOUT_S` take in the median on this machine, stalls included."""

    async def one():
        started_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hanging(), TIMEOUT_S)
        return time.monotonic() - started_s

    return sorted(await asyncio.gather(*(one() for _ in range(AT_ONCE))))[AT_ONCE // 2]


async def test_a_router_that_hangs_holds_nobody_up_under_load():
    ratios = []
    while not ratios or (ratios[-1] >= 5 and len(ratios) < 3):  # the machine may stand still for once
        counts = Counts()
        router = Router(hanging)
        client = PlacementClient(router, TIMEOUT_S, counts)
        plain = asyncio.create_task(waits_in_vain())
        done = await asyncio.gather(*(place(client) for _ in range(AT_ONCE)))
        assert {decision for decision, _ in done} == {None}
        waits = sorted(wait_s for _, wait_s in done)
        ratios.append(waits[AT_ONCE // 2] / max(await plain, TIMEOUT_S))
        assert sum(counts.values()) == AT_ONCE
    assert min(ratios) < 5, "the wait does not grow with those who wait"
    asked = router.place.calls
    wait_s = min([(await place(client))[1] for _ in range(5)])
    assert wait_s < TIMEOUT_S / 2, "the next ones do not wait at all"
    assert router.place.calls == asked


async def test_a_client_that_leaves_ends_the_wait():
    counts = Counts()
    waiting = asyncio.create_task(place(PlacementClient(Router(hanging), TIMEOUT_S, counts)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not counts, "nothing ails the router"


async def test_one_slow_answer_does_not_make_the_next_ones_do_without_the_router():
    router = Router(hanging)
    client = PlacementClient(router, TIMEOUT_S, Counts())
    await place(client)
    router.place.play = answering(HERE)
    assert (await place(client))[0] == HERE
    router.place.play = hanging
    await place(client)
    router.place.play = answering(HERE)
    assert (await place(client))[0] == HERE, "waits in vain count only when they follow on each other"


async def test_a_router_that_answers_others_meanwhile_is_not_left_alone():
    """With hundreds of requests a second a moment's load would make all of the next second do without it."""
    counts = Counts()
    router = Router(hanging)
    client = PlacementClient(router, TIMEOUT_S, counts)
    late = [asyncio.create_task(place(client)) for _ in range(5)]
    await asyncio.sleep(TIMEOUT_S / 2)
    router.place.play = answering(HERE)
    assert (await place(client))[0] == HERE
    assert [decision for decision, _ in await asyncio.gather(*late)] == [None] * 5
    assert (await place(client))[0] == HERE
    assert counts == {"timeout": 5}


async def test_a_dead_router_is_left_alone_and_asked_again_later(monkeypatch):
    monkeypatch.setattr(placement_client, "_PAUSE_S", 0.05)
    counts = Counts()
    router = Router(dying)
    client = PlacementClient(router, TIMEOUT_S, counts)
    assert [(await place(client))[0] for _ in range(3)] == [None] * 3
    assert counts == {"error": 1, "paused": 2}
    router.place.play = answering(HERE)
    await asyncio.sleep(0.06)
    assert (await place(client))[0] == HERE


async def test_a_router_that_has_just_started_is_done_without_but_not_left_alone():
    counts = Counts()
    router = Router(answering(Rejected(RejectionReason.NOT_SETTLED, 1.0, None, None)))
    client = PlacementClient(router, TIMEOUT_S, counts)
    assert (await place(client))[0] is None
    router.place.play = answering(HERE)
    assert (await place(client))[0] == HERE


async def test_the_router_is_told_what_lives_until_it_hears_it(monkeypatch):
    monkeypatch.setattr(placement_client, "RECONCILE_S", 0.02)
    told, stalls = [], [True, True]

    async def hear(live):
        if stalls:
            stalls.pop()
            await asyncio.Event().wait()
        told.append(live)

    router = Router(answering(HERE))
    router.reconcile, router.job_ended = Method(hear), Method(hanging)
    client = PlacementClient(router, TIMEOUT_S, Counts())
    requests = [replace(request(), job_id=JobId(name)) for name in "abc"]
    for each in requests:
        await client.place(each)
    client.job_ended(JobEnded(JobId("b")))
    await asyncio.sleep(0.3)
    assert set(told[-1].jobs) == {"a", "c"}
    assert told[-1].asked == 3
    client.job_ended(JobEnded(JobId("a")))
    client.job_ended(JobEnded(JobId("c")))
    await asyncio.sleep(0.1)
    assert told[-1].jobs == ()


async def test_a_word_of_what_lives_that_is_cancelled_from_below_is_not_the_last(monkeypatch):
    """As Serve does with a call that its replica cancels."""
    monkeypatch.setattr(placement_client, "RECONCILE_S", 0.02)
    told, third = [], asyncio.Event()

    async def hear(live):
        told.append(live)
        if len(told) == 3:
            third.set()
        raise asyncio.CancelledError

    router = Router(answering(HERE))
    router.reconcile = Method(hear)
    PlacementClient(router, TIMEOUT_S, Counts()).start()
    await asyncio.wait_for(third.wait(), 5)


async def test_a_router_that_is_cancelled_over_a_question_has_not_answered_it():
    """As Serve has it where the router ends; whoever is cancelled here itself is."""

    async def cancelled():
        raise asyncio.CancelledError

    router = Router(answering(HERE))
    router.fleet = Method(cancelled)
    assert await PlacementClient(router, TIMEOUT_S, Counts()).fleet() is None
    router.fleet = Method(hanging)
    asking = asyncio.create_task(PlacementClient(router, TIMEOUT_S, Counts()).fleet())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_no_word_of_what_lives_overtakes_that_of_an_end(monkeypatch):
    """Of what it hears first the router ends a request, and only an end says what was taken."""
    monkeypatch.setattr(placement_client, "RECONCILE_S", 0.1)
    heard, spoken, empty = [], asyncio.Event(), asyncio.Event()

    async def reconcile(live):
        heard.append(set(live.jobs))
        (spoken if live.jobs else empty).set()

    async def end(ended):
        await spoken.wait()
        heard.append(ended.job_id)

    router = Router(answering(HERE))
    router.reconcile, router.job_ended = Method(reconcile), Method(end)
    client = PlacementClient(router, TIMEOUT_S, Counts())
    await client.place(request())
    client.job_ended(JobEnded(JobId("job")))
    async with asyncio.timeout(5):
        await empty.wait()
    assert heard[:2] == [{"job"}, "job"]


async def test_a_router_that_was_away_is_told_of_the_ends_that_it_has_missed(monkeypatch):
    """It ends what does not live any more, and only an end says what was taken."""
    monkeypatch.setattr(placement_client, "RECONCILE_S", 0.02)
    monkeypatch.setattr(background, "TIMEOUT_S", 0.05)
    is_away, heard = True, []
    given_up, again = asyncio.Event(), asyncio.Event()

    async def reconcile(live):
        if is_away:
            await asyncio.Event().wait()
        if heard:
            again.set()
        heard.extend(live.ended)

    async def end(_):
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    router = Router(answering(HERE))
    router.reconcile, router.job_ended = Method(reconcile), Method(end)
    client = PlacementClient(router, TIMEOUT_S, Counts())
    await client.place(request())
    ended = JobEnded(JobId("job"), used=Usage(100, 10))
    client.job_ended(ended)
    async with asyncio.timeout(5):
        await given_up.wait()
        is_away = False
        await again.wait()
    assert heard == [ended], "once"


async def test_missed_ends_come_a_few_at_a_time_until_they_are_heard(monkeypatch):
    """A call for each of them, of all ingresses at once, would keep a router away that has just come back."""
    monkeypatch.setattr(placement_client, "RECONCILE_S", 0.02)
    monkeypatch.setattr(placement_client, "_MOST_AT_ONCE", 2)
    monkeypatch.setattr(placement_client, "_MOST_UNTOLD", 5)
    words, lost, idle = [], [1, 3], asyncio.Event()

    async def reconcile(live):
        words.append([ended.job_id for ended in live.ended])
        if len(words) in lost:
            raise ConnectionError
        if not live.ended:
            idle.set()

    router = Router(answering(HERE))
    router.reconcile, router.job_ended = Method(reconcile), Method(dying)
    client = PlacementClient(router, TIMEOUT_S, Counts())
    for name in "abcdef":
        client.job_ended(JobEnded(JobId(name)))
    client.start()
    async with asyncio.timeout(5):
        await idle.wait()
    assert words == [["b", "c"], ["b", "c"], ["d", "e"], ["d", "e"], ["f"], []], "only five are kept"
    assert router.job_ended.calls == 6


async def test_a_rejected_request_does_not_live():
    client = PlacementClient(
        Router(answering(Rejected(RejectionReason.NO_REPLICA, 1.0, None, None))), TIMEOUT_S, Counts()
    )
    await client.place(request())
    assert not client._live


async def test_it_speaks_before_anybody_asks(monkeypatch):
    """What another ingress had asked for ends by it."""
    monkeypatch.setattr(placement_client, "RECONCILE_S", 0.02)
    router = Router(answering(HERE))
    router.reconcile = Method(answering(None))
    client = PlacementClient(router, TIMEOUT_S, Counts())
    client.start()
    client.start()
    await asyncio.sleep(0.07)
    assert 1 <= router.reconcile.calls <= 4
