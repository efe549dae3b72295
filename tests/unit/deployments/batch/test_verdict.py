"""What answers mean for the requests of a batch."""

import json
from datetime import UTC, datetime

import pytest

from decode_node.answers import EngineError
from deployments.batch.verdict import Verdict, judge, retry_after_s
from deployments.http import errors as http_errors
from slo.errors import Rejected, RejectionReason


@pytest.mark.parametrize(
    ("status", "code", "headers", "verdict"),
    [
        (200, "", {}, Verdict.ANSWERED),
        (400, "invalid_value", {}, Verdict.WRONG),
        (404, "no_such_route", {}, Verdict.WRONG),
        (413, "body_too_large", {}, Verdict.WRONG),
        (429, "deadline_infeasible", {"x-should-retry": "false"}, Verdict.WRONG),
        (429, "over_share", {}, Verdict.REFUSED),
        (429, "dropped", {}, Verdict.REFUSED),
        (503, "no_replica", {}, Verdict.REFUSED),
        (503, "", {}, Verdict.REFUSED),
        (503, "decode_failed", {}, Verdict.FAILED),
        (503, "prefill_failed", {}, Verdict.FAILED),
        (500, "engine_error", {}, Verdict.FAILED),
        (502, "", {}, Verdict.FAILED),
        (408, "body_timeout", {}, Verdict.FAILED),
        (401, "invalid_api_key", {}, Verdict.OF_THE_RUN),
    ],
)
def test_each_status(status, code, headers, verdict):
    body = {"choices": []} if status == 200 else {"error": {"code": code}}
    assert judge(status, headers, body) is verdict


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (http_errors.decode_failed("no_replica"), Verdict.FAILED),
        (http_errors.engine_error(EngineError("no other", "prefill_failed", 503, "10")), Verdict.FAILED),
        (http_errors.not_begun(), Verdict.REFUSED),
        (http_errors.rejected(Rejected(RejectionReason.NO_REPLICA, 10.0), {}), Verdict.REFUSED),
    ],
)
def test_what_the_last_replica_was_lost_with_counts_as_a_try(error, verdict):
    answer = error.response()
    assert judge(answer.status_code, answer.headers, json.loads(answer.body)) is verdict
    assert retry_after_s(answer.headers, datetime.now(UTC)) == 10.0


def test_a_tier_that_there_is_not_is_the_runs():
    assert judge(400, {}, {"error": {"code": "invalid_value", "param": "x-slo-tier"}}) is Verdict.OF_THE_RUN


def test_a_tier_in_the_body_is_that_requests():
    told = {"error": {"code": "invalid_value", "param": "x-slo-tier"}}
    assert judge(400, {}, told, names_tier=True) is Verdict.WRONG
    assert judge(401, {}, told, names_tier=True) is Verdict.OF_THE_RUN


def test_only_a_404_of_serves_proxy_is_waited_for():
    assert judge(404, {}, None, text="Path '/v1/completions' not found. Ping") is Verdict.REFUSED
    assert judge(404, {}, None, text="<html><head><title>404 Not Found</title>") is Verdict.WRONG
    assert judge(404, {}, None) is Verdict.WRONG
    assert judge(404, {}, {"detail": "Not Found"}, text='{"detail": "Not Found"}') is Verdict.WRONG


@pytest.mark.parametrize("said", [None, [], "text"])
def test_an_answer_that_is_no_object_has_failed(said):
    assert judge(200, {}, said) is Verdict.FAILED


@pytest.mark.parametrize("said", [None, [], "text", {"error": "text"}, {"error": None}])
@pytest.mark.parametrize(("status", "verdict"), [(400, Verdict.WRONG), (503, Verdict.REFUSED)])
def test_errors_of_any_shape(status, verdict, said):
    assert judge(status, {}, said) is verdict


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("12", 12.0),
        ("Wed, 21 Oct 2026 07:28:10 GMT", 10.0),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0),
        ("soon", None),
        ("-3", None),
        ("", None),
    ],
)
def test_how_long_a_server_asks_to_be_left_alone(given, seconds):
    now = datetime(2026, 10, 21, 7, 28, 0, tzinfo=UTC)
    assert retry_after_s({"retry-after": given}, now) == seconds
    assert retry_after_s({}, now) is None
