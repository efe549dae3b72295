"""What `/ready` answers, by what the router says of each model's fleet."""

import json

import pytest

from deployments.http.placing.readiness import readiness


def fleet(model="a", *, prefill=True, decode=True, ready=None):
    return {
        "model": model,
        "ready": prefill and decode if ready is None else ready,
        "prefill": prefill,
        "decode": decode,
    }


def answer(*fleets, of_all=False, tells=False):
    response = readiness(fleets, of_all=of_all, tells=tells)
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


def test_the_fleet_is_told_to_those_who_may_know():
    assert answer(fleet("a"), tells=True) == (200, {"status": "ready", "fleet": fleet("a")})
    a, b = fleet("a"), fleet("b")
    assert answer(a, b, tells=True) == (200, {"status": "ready", "fleets": {"a": a, "b": b}})
    assert answer(a, b) == (200, {"status": "ready"})
