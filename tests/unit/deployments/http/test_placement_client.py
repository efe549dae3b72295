"""An ingress whose request is held waits as long as the router lives, and goes on without it otherwise."""

import asyncio

import pytest

from deployments.http import placement_client
from deployments.http.placement_client import PlacementClient
from router.messages import Evicted, Held, PlacementRequested
from slo.errors import EvictionReason
from slo.objectives import Objective
from slo.request import JobId
from slo.tiers import STANDARD

REQUEST = PlacementRequested(JobId("x"), Objective(STANDARD, 1.0, None), False, 100, 0)
EVICTED = Evicted(EvictionReason.DEADLINE_PASSED, 1.0, 2.0)


class Call:
    """A method of a deployment handle."""

    def __init__(self, answers):
        self.answers = [*answers]
        self.asked = []

    def remote(self, *arguments):
        self.asked.append(arguments)
        return self.answer()

    async def answer(self):
        answer = self.answers.pop(0)
        if answer == "silence":
            await asyncio.sleep(60)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Router:
    def __init__(self, *later):
        self.place = Call([Held(JobId("x"))])
        self.placement = Call(later)


class Counts:
    def __init__(self):
        self.causes = []

    def count(self, metric, cause):
        self.causes.append(cause)


async def ask(router):
    counts = Counts()
    decision = await PlacementClient(router, 0.05, counts).place(REQUEST)
    return decision, counts.causes


async def test_it_asks_again_for_as_long_as_the_request_is_held():
    router = Router(Held(JobId("x")), Held(JobId("x")), EVICTED)
    assert await ask(router) == (EVICTED, [])
    assert [ticket for ticket, _ in router.placement.asked] == ["x"] * 3


@pytest.mark.parametrize(
    ("later", "cause"),
    [(None, "ticket_lost"), ("silence", "timeout"), (RuntimeError("the actor died"), "error")],
    ids=["started anew", "silent", "dead"],
)
async def test_a_router_that_is_lost_is_done_without(later, cause, monkeypatch):
    monkeypatch.setattr(placement_client, "_ALIVE_S", 0.01)
    assert await ask(Router(Held(JobId("x")), later)) == (None, [cause])


async def test_a_client_that_leaves_ends_the_wait():
    waiting = asyncio.create_task(ask(Router("silence")))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
