"""What a client gets for an error of a replica, and how its request counts then."""

import json

import pytest

from decode_node.answers import EngineError
from deployments.http.errors import ended_by, engine_error, rejected
from slo.errors import Rejected, RejectionReason
from slo.objectives import Objective
from slo.outcomes import Outcome
from slo.tiers import STANDARD

OURS = {
    "deadline_passed": (429, "overloaded_error", Outcome.EVICTED),
    "dropped": (429, "overloaded_error", Outcome.EVICTED),
    "prefill_failed": (503, "service_unavailable", Outcome.FAILED),
    "grammars": (429, "rate_limit_error", Outcome.REJECTED),
    "no_replica": (503, "service_unavailable", Outcome.FAILED),
}


@pytest.mark.parametrize("kind", OURS)
def test_what_a_replica_gives_up_has_its_reason_as_code_and_says_when_to_come_back(kind):
    status, named, outcome = OURS[kind]
    error = engine_error(EngineError("why", kind, status))
    body = json.loads(error.response().body)["error"]
    assert (error.status, body["type"], body["code"], body["message"]) == (status, named, kind, "why")
    assert int(error.headers["retry-after"]) >= 1
    assert ended_by(error) is outcome


def test_a_replica_may_say_itself_when_to_come_back():
    error = engine_error(EngineError("why", "prefill_failed", 503, "10"))
    assert (error.code, error.param, error.headers) == ("prefill_failed", None, {"retry-after": "10"})


@pytest.mark.parametrize(("status", "outcome"), [(400, Outcome.REJECTED), (500, Outcome.FAILED)])
def test_what_an_engine_refuses_is_the_clients_fault_and_what_it_fails_the_servers(status, outcome):
    error = engine_error(EngineError("why", "BadRequestError", status, "prompt"))
    assert (error.status, error.param, error.headers) == (status, "prompt", {})
    assert ended_by(error) is outcome


def test_what_a_replica_has_too_much_to_do_for_is_shed_and_told_when_to_come_again():
    error = engine_error(EngineError("why", "backlog", 429, "7"))
    body = json.loads(error.response().body)["error"]
    assert (error.status, body["type"], body["code"]) == (429, "overloaded_error", "backlog")
    assert (body["param"], error.headers) == (None, {"retry-after": "7"})
    assert ended_by(error) is Outcome.SHED


@pytest.mark.parametrize(
    ("budget_s", "told"),
    [
        (0.0005, "0.5 ms"),
        (0.25, "250 ms"),
        (1.23456, "1234.56 ms"),
        (1200.0, "1200000 ms"),
        (1234.5675, "1234567.5 ms"),
        (3600.0, "3600000 ms"),
    ],
)
def test_a_budget_is_told_as_it_was_given(budget_s, told):
    refused = Rejected(RejectionReason.DEADLINE_INFEASIBLE, None, 0.6, budget_s)
    error = rejected(refused, {}, Objective(STANDARD, budget_s, None))
    assert f"is due after {told}; " in error.message
