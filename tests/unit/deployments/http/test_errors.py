"""What a client gets for an error of a replica, and how its request counts then."""

import json
import re
from pathlib import Path

import pytest

from decode_node.answers import EngineError
from deployments.http import errors
from deployments.http.errors import ended_by, engine_error, rejected
from slo.errors import AuthenticationError, FieldError, Rejected, RejectionReason
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


PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
NOT_SAID = {RejectionReason.DEADLINE_INFEASIBLE, RejectionReason.NOT_SETTLED}
"""The one needs an objective, and nobody is refused for the other."""
ERRORS = [
    errors.bad_field(FieldError("seed", "is no number", "give one")),
    errors.unauthorized(AuthenticationError("unknown key")),
    errors.origin_not_allowed("https://example.com"),
    errors.unknown_model("one", ["other"]),
    errors.no_route(404, ""),
    errors.no_route(405, ""),
    errors.too_slow(1.0),
    errors.too_large(1),
    errors.encoded("gzip"),
    errors.too_many_headers("too many"),
    errors.too_many_conversions(1),
    *(rejected(Rejected(reason, 1.0), {}) for reason in RejectionReason if reason not in NOT_SAID),
    *(engine_error(EngineError("why", kind, status)) for kind, (status, _, _) in OURS.items()),
    engine_error(EngineError("why", "BadRequestError", 400)),
    engine_error(EngineError("why", "InternalServerError", 500)),
    errors.internal_error("id"),
    errors.keys_not_read(),
    errors.too_much_in_flight(1),
    errors.decode_failed("limit"),
]


def types_on_the_page(error):
    """The type that docs/api.md gives an error, and the one of the messages API."""
    table = PAGE.split("| Status | `type` |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    of_status = [row for row in rows if str(error.status) in row[0].partition(":")[0]]
    (row,) = [row for row in of_status if f"`{error.code}`" in row[0]] or [
        row for row in of_status if "`" not in row[0]
    ]
    codes, kinds, of_messages = row
    (kind,) = re.findall(r"`(\w+)`", kinds)
    theirs = re.findall(r"`(\w+)`", of_messages) or [kind]
    return kind, dict(zip(codes.split(", "), theirs, strict=True))[str(error.status)] if theirs[
        1:
    ] else theirs[0]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{error.status}-{error.code}")
def test_the_page_has_the_type_of_each_error(error):
    kind, of_messages = types_on_the_page(error)
    assert json.loads(error.response().body)["error"]["type"] == kind
    assert json.loads(error.response(errors.MESSAGES_PATH).body)["error"]["type"] == of_messages
