"""What a route makes of a request before it is placed."""

import asyncio
import contextlib
import json
import time
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from deployments.config.limits import LimitsConfig
from deployments.http.body.reading_turns import ReadingTurns
from deployments.http.errors import HTTPError
from deployments.http.ingress import SlackServeIngress
from deployments.http.model_config import ModelConfig
from deployments.http.placing.prefix_hashes import NO_PREFIX
from slo.admission.tenants import ANONYMOUS
from slo.errors import FieldError
from slo.tiers import DEFAULT_TIERS

SAMPLED_WITH = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
SERVED = SimpleNamespace(config=ModelConfig("m", 100, 60, SAMPLED_WITH, shows_usage=False))

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Once"}, "finish_reason": "stop"}
ANSWER = {"model": "m", "choices": [CHOICE], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


class Ingress(SlackServeIngress):
    """Keeps what it would have placed and answered."""

    def __init__(self, **limits):
        self._limits, self._tiers = LimitsConfig(**limits), DEFAULT_TIERS
        self._turns = ReadingTurns(self._limits.max_bytes_in_flight)
        self._models = SimpleNamespace(named_by=lambda body: SERVED)
        self._conversions = SimpleNamespace(answer=self._converted)

    async def _converted(self, *_):
        pass

    def _get_configured_serve_handle(self, _):
        converter = SimpleNamespace(remote=len)
        return SimpleNamespace(tokenize=converter, detokenize=converter)

    async def _serve_body(self, request, body, method, arrived_s, wording=None):
        self.body, self.wording = body, wording


JSON = (b"content-type", b"application/json")


def posted(body, *headers):
    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    state = {"request_id": "from-header", "tenant": ANONYMOUS, "headers": []}
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers or [JSON], "state": state}
    return Request(scope, receive)


@pytest.mark.parametrize(
    ("given", "of_chat", "of_answer"),
    [({}, None, "resp_from-header"), ({"request_id": "mine"}, "mine", "mine")],
)
async def test_the_id_of_a_response(given, of_chat, of_answer):
    ingress = Ingress()
    await ingress.responses(posted({"input": "hi", **given}))
    found = ingress.body.request_id if "request_id" in ingress.body.model_fields_set else None
    assert found == of_chat, "what the chat does with the id of its own body"
    assert ingress.wording.whole(ANSWER)["id"] == of_answer


class Naming(SlackServeIngress):
    """Goes no further than to the account of a request."""

    def __init__(self):
        self._limits, self._tiers = LimitsConfig(), DEFAULT_TIERS
        self._turns = ReadingTurns(self._limits.max_bytes_in_flight)
        self._models = SimpleNamespace(named_by=lambda body: SERVED)

    def _record(self, served, asked, state, method):
        self.asked = asked.placement
        raise HTTPError(503, "no further", kind="test", code=asked.placement.job_id)


@pytest.mark.parametrize(
    ("given", "name", "lines"),
    [
        ({}, "from-header", []),
        ({"request_id": "from-header"}, "from-header", []),
        (
            {"request_id": "mine"},
            "mine",
            ["request_named request_id=mine server_id=fc419b9ddd3a0b11 x_request_id=from-header"],
        ),
    ],
    ids=str,
)
async def test_the_log_has_both_names_of_a_request_that_its_body_names(caplog, given, name, lines):
    request = posted({"model": "m", "prompt": "hi", "max_tokens": 1, **given})
    request.state.server_id = "fc419b9ddd3a0b11"
    with caplog.at_level("INFO", "ray.serve"), pytest.raises(HTTPError) as ended:
        await Naming().completions(request)
    assert ended.value.code == f"{name}-fc419b9ddd3a0b11", "its job"
    assert caplog.messages == lines


@pytest.mark.parametrize(("named", "most"), [({}, 50), ({"max_tokens": 55}, 55), ({"max_tokens": 90}, 60)])
async def test_the_router_is_told_the_most_that_an_answer_has(named, most):
    request = posted({"model": "m", "messages": ASKED, **named})
    request.state.server_id = "fc419b9ddd3a0b11"
    naming = Naming()
    with pytest.raises(HTTPError, match="no further"):
        await naming.chat(request)
    assert naming.asked.output_tokens == most


@pytest.mark.parametrize(("priority", "is_refused"), [("5", True), ("-1", True), ("x", True), ("0", False)])
async def test_a_priority_in_vllms_header_is_refused_as_in_the_body(priority, is_refused):
    request = posted({"model": "m", "prompt": "hi", "max_tokens": 1})
    request.state.server_id = "fc419b9ddd3a0b11"
    request.state.headers = [("x-vllm-priority", priority)]
    with pytest.raises(FieldError if is_refused else HTTPError) as ended:
        await Naming().completions(request)
    if is_refused:
        told = "x-vllm-priority: is not used here; set x-slo-tier or service_tier instead"
        assert str(ended.value) == told


async def test_what_the_router_is_told_of_a_prompt_holds_the_loop_no_longer_than_others_have_it(monkeypatch):
    turn, hashed_in = 0, []

    def prefix_hashes(_):
        hashed_in.append(turn)
        time.sleep(0.01)
        return NO_PREFIX

    async def others():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr("deployments.http.placing.asked.prefix_hashes", prefix_hashes)
    ingress, streaming = Naming(), asyncio.create_task(others())
    requests = [posted({"model": "m", "prompt": "hi", "max_tokens": 1}) for _ in range(5)]
    for request in requests:
        request.state.server_id = "fc419b9ddd3a0b11"
    await asyncio.gather(*map(ingress.completions, requests), return_exceptions=True)
    streaming.cancel()
    assert len(hashed_in) == 5
    assert hashed_in[-1] - hashed_in[1] > 100, "the first two may be read at once"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, (0.6, 0.9)),
        ({"temperature": 1.5}, (1.5, 0.9)),
        ({"top_p": 0.5}, (0.6, 0.5)),
        ({"temperature": 0}, (0.0, 1.0)),  # greedily, where vLLM has no top_p
    ],
    ids=str,
)
async def test_a_response_tells_what_it_was_sampled_with(asked, told):
    ingress = Ingress()
    await ingress.responses(posted({"input": "hi", **asked}))
    response = ingress.wording.whole(ANSWER)
    assert (response["temperature"], response["top_p"]) == told


@pytest.mark.parametrize(
    ("asked", "told"), [({}, 50), ({"max_output_tokens": 55}, 55), ({"max_output_tokens": 70}, 60)], ids=str
)
async def test_a_response_is_told_the_most_that_its_answer_has(asked, told):
    ingress = Ingress()
    await ingress.responses(posted({"input": "hi", **asked}))
    assert ingress.wording.response("m", [], None, None).max_output_tokens == told


@pytest.mark.parametrize(("written", "told"), [(59, "tool_use"), (60, "max_tokens")])
async def test_a_message_is_told_that_the_most_that_any_answer_has_cut_it(written, told):
    ingress = Ingress()
    await ingress.messages(posted({"model": "m", "messages": ASKED, "max_tokens": 90}))
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": written, "total_tokens": written + 1}
    answer = {"id": "c", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    assert ingress.wording.whole(answer)["stop_reason"] == told


@pytest.mark.parametrize(
    ("said", "is_json"),
    [
        (b"application/json", True),
        (b"Application/JSON; charset=utf-8", True),
        (b"application/json ;charset=utf-8", True),
        (b"text/plain", False),
        (b"text/plain; application/json", False),
        (b"application/x-www-form-urlencoded", False),
        (b"multipart/form-data; boundary=x", False),
        (b"", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("route", ["chat", "completions", "responses", "tokenize", "detokenize"])
async def test_a_body_is_read_that_is_said_to_be_json_and_no_other_as_in_vllm(route, said, is_json):
    """A web page may send others without asking first."""
    ingress = Ingress()
    fields = {"chat": {"messages": []}, "responses": {"input": "hi"}, "detokenize": {"tokens": [1]}}
    headers = [(b"x-other", b"x")] if said is None else [(b"content-type", said)]
    request = posted(fields.get(route, {"prompt": "hi"}), *headers)
    with contextlib.nullcontext() if is_json else pytest.raises(HTTPError) as refused:
        await getattr(ingress, route)(request)
    if not is_json:
        error = refused.value
        assert (error.status, error.param, error.code) == (400, "content-type", "invalid_value")
        assert error.message == "Unsupported Media Type: Only 'application/json' is allowed"


ASKED = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("chat", {"messages": ASKED}),
        ("completions", {"prompt": "hi"}),
        ("responses", {"input": "hi"}),
        ("messages", {"model": "m", "messages": ASKED, "max_tokens": 1}),
        ("count_tokens", {"model": "m", "messages": ASKED}),
        ("tokenize", {"prompt": "hi"}),
        ("tokenize", {"messages": ASKED}),
        ("detokenize", {"tokens": [7]}),
    ],
    ids=lambda given: given if isinstance(given, str) else next(iter(given)),
)
async def test_between_two_bodies_that_take_long_to_read_others_have_the_loop(route, fields):
    """They become whole at the same time, and all streams would stand still until the last was read."""
    turn, read_in = 0, []

    class Noting(Ingress):
        async def _serve_body(self, *_, **__):
            read_in.append(turn)

        async def _converted(self, *_):
            read_in.append(turn)

    async def others():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    ingress, streaming = Noting(), asyncio.create_task(others())
    ingress._turns = ReadingTurns(ingress._limits.max_bytes_in_flight, at_once_s=0.0)
    await asyncio.gather(*(getattr(ingress, route)(posted(fields)) for _ in range(4)))
    streaming.cancel()
    assert len(set(read_in)) == 4
