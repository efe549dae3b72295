"""What `/ready` answers, by what the router says of each model's fleet."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from deployments.http.placing import readiness as how_often
from deployments.http.placing.readiness import Readiness
from deployments.http.served_model import ServedModels
from router.fleet.view import RouterLimits
from router.serve.deployment import SlackRouter
from router.serve.model_router import Route, RouterConfig
from slo.tiers import DEFAULT_TIERS


def fleet(model="a", *, prefill=True, decode=True, ready=None, serves=None, settled=True):
    is_ready = prefill and decode if ready is None else ready
    return {
        "model": model,
        "ready": is_ready,
        "serves": is_ready if serves is None else serves,
        "settled": settled,
        "prefill": prefill,
        "decode": decode,
    }


def answer(*fleets, of_all=False, degraded=False, tells=False, readiness=None):
    response = (readiness or Readiness()).answer(fleets, of_all=of_all, degraded=degraded, tells=tells)
    return response.status_code, json.loads(response.body)


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (fleet(prefill=False), "no warm replica in: prefill"),
        (fleet(prefill=False, decode=False), "no warm replica in: prefill, decode"),
        (fleet(ready=False), "no warm replica in: any tier, all reports are old"),
        (None, "the router does not answer"),
    ],
)
def test_a_model_that_is_not_ready_says_what_it_waits_for(one, reason):
    assert answer(one) == (503, {"status": "not ready", "reason": reason})


def test_one_model_that_is_not_ready_takes_no_request_from_another():
    waiting = {"b": "no warm replica in: decode"}
    fleets = fleet("a"), fleet("b", decode=False)
    assert answer(*fleets) == (200, {"status": "ready", "waiting": waiting})
    reason = "b: no warm replica in: decode"
    assert answer(*fleets, of_all=True) == (
        503,
        {"status": "not ready", "reason": reason, "waiting": waiting},
    )


def test_without_any_model_that_is_ready_nothing_is():
    status, body = answer(fleet("a", decode=False), fleet("b", prefill=False))
    assert status == 503
    assert body["reason"] == "a: no warm replica in: decode, b: no warm replica in: prefill"


def test_a_router_that_answers_for_one_model_alone_is_in_trouble():
    assert answer(fleet("a"), None, tells=True)[0] == 503


async def test_a_model_that_the_router_does_not_know_is_one_that_waits():
    """Between an ingress and a router of two configurations, of which one has a model more."""
    router = SlackRouter(RouterConfig(DEFAULT_TIERS, "least_harm", RouterLimits(), {"a": Route()}))
    fleets = fleet("a"), await router.fleet(model="b")
    waiting = {"b": "no warm replica in: prefill, decode"}
    assert answer(*fleets) == (200, {"status": "ready", "waiting": waiting})
    assert answer(*fleets, degraded=True)[0] == 200
    assert answer(*fleets, of_all=True)[0] == 503


def test_the_fleet_is_told_to_those_who_may_know():
    assert answer(fleet("a"), tells=True) == (200, {"status": "ready", "fleet": fleet("a")})
    a, b = fleet("a"), fleet("b")
    assert answer(a, b, tells=True) == (200, {"status": "ready", "fleets": {"a": a, "b": b}})
    assert answer(a, b) == (200, {"status": "ready"})


WITHOUT_PREFILL = {"status": "degraded", "reason": "no warm replica in: prefill"}


def test_a_model_that_decode_serves_alone_is_degraded_for_those_who_ask():
    lost = fleet(prefill=False, serves=True)
    assert answer(lost)[0] == 503
    assert answer(lost, degraded=True) == (200, WITHOUT_PREFILL)
    assert answer(fleet(prefill=False), degraded=True)[0] == 503
    assert answer(fleet(), degraded=True) == (200, {"status": "ready"})


def test_of_several_models_one_that_is_served_at_all_suffices_unless_all_are_asked_for():
    lost, gone = fleet("a", prefill=False, serves=True), fleet("b", decode=False)
    assert answer(lost, gone, degraded=True)[0] == 200
    assert answer(lost, gone, degraded=True, of_all=True)[0] == 503
    assert answer(lost, fleet("b"), degraded=True, of_all=True)[0] == 200


def test_without_the_router_an_ingress_that_has_served_goes_on():
    readiness = Readiness()
    silent = {"reason": "the router does not answer"}
    assert answer(None, degraded=True, readiness=readiness) == (503, {"status": "not ready", **silent})
    answer(fleet(), readiness=readiness)
    assert answer(None, degraded=True, readiness=readiness) == (200, {"status": "degraded", **silent})
    assert answer(None, readiness=readiness)[0] == 503
    answer(fleet(decode=False), readiness=readiness)
    assert answer(None, degraded=True, readiness=readiness)[0] == 503


def test_while_a_new_router_has_not_heard_of_its_replicas_an_ingress_that_has_served_goes_on():
    readiness = Readiness()
    new, old = fleet(prefill=False, settled=False), fleet()
    assert answer(new, degraded=True, readiness=readiness)[0] == 503
    answer(old, readiness=readiness)
    for _ in range(2):
        assert answer(new, degraded=True, readiness=readiness) == (200, WITHOUT_PREFILL)
        assert answer(None, degraded=True, readiness=readiness)[0] == 200
        assert answer(new, readiness=readiness)[0] == 503
    answer(fleet(prefill=False), readiness=readiness)
    assert answer(new, degraded=True, readiness=readiness)[0] == 503


def test_a_router_of_the_code_before_says_nothing_of_having_settled():
    of_before = {key: value for key, value in fleet(decode=False).items() if key != "settled"}
    assert answer(of_before, degraded=True)[0] == 503
    assert answer(of_before)[0] == 503


def test_of_several_models_a_new_router_keeps_those_that_were_served():
    readiness = Readiness()
    answer(fleet("a"), fleet("b", decode=False), readiness=readiness)
    new = fleet("a", decode=False, settled=False), fleet("b", decode=False, settled=False)
    assert answer(*new, degraded=True, readiness=readiness)[0] == 200
    assert answer(*new, degraded=True, of_all=True, readiness=readiness)[0] == 503
    now = fleet("a", settled=False), fleet("b", settled=False)
    assert answer(*now, of_all=True, readiness=readiness)[0] == 200
    assert answer(*new, degraded=True, of_all=True, readiness=readiness)[0] == 200


class Router:
    """Says of a fleet how often it was asked, as soon as it may."""

    def __init__(self):
        self.asked, self.may_answer = 0, asyncio.Event()

    async def fleet(self):
        self.asked += 1
        await self.may_answer.wait()
        return self.asked

    def models(self):
        served = SimpleNamespace(config=SimpleNamespace(name="a"), placement=self)
        return ServedModels([served], {"a": "a"})


async def test_a_flood_of_questions_asks_the_router_once(monkeypatch):
    """Nobody needs a key for `/ready`: placements would wait behind the questions."""
    monkeypatch.setattr(how_often, "KEPT_S", 60.0)  # longer than a thousand tasks take on a busy machine
    router = Router()
    models = router.models()
    asking = [asyncio.create_task(models.fleets()) for _ in range(1000)]
    await asyncio.sleep(0)
    asking[0].cancel()  # who asked first leaves, and nobody else with it
    await asyncio.sleep(0)
    router.may_answer.set()
    assert await asyncio.gather(*asking[1:]) == [[1]] * 999
    assert await models.fleets() == [1]
    assert router.asked == 1


async def test_an_answer_is_kept_for_a_moment(monkeypatch):
    monkeypatch.setattr(how_often, "KEPT_S", 0.01)
    router = Router()
    router.may_answer.set()
    models = router.models()
    assert await models.fleets() == [1]
    await asyncio.sleep(0.02)
    assert await models.fleets() == [2]
