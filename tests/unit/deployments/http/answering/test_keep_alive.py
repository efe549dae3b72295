"""What keeps the connection of a stream open that has nothing to send, through the application itself."""

import asyncio
import gc
import json
import time
from contextlib import aclosing
from types import SimpleNamespace

import grpc
import pytest
from grpc_context import Context

from decode_node.answers import error_response
from deployments.config.limits import LimitsConfig
from deployments.grpc import inference_pb2 as pb
from deployments.grpc.exchange import exchange
from deployments.grpc.methods import InferenceIngress
from deployments.http import errors as http_errors
from deployments.http import routes
from deployments.http.answering.keep_alive import COMMENT, kept_alive
from deployments.http.body.reading_turns import ReadingTurns
from deployments.http.model_config import ModelConfig
from slo.admission.tenants import KeyRing
from slo.errors import TOO_MANY_GRAMMARS
from slo.outcomes import Outcome
from slo.tiers import DEFAULT_TIERS

INTERVAL_S = 0.05
LONG_S = 3.5 * INTERVAL_S
HEARD = "until two more comments are read"
TEXT = 'data: {"model":"tiny","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
HIDDEN = 'data: {"model":"tiny","choices":[]}\n\n'
"""Has the usage of a stream whose client has not asked for it."""
CHAT = 'data: {"model":"tiny","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
DONE = "data: [DONE]\n\n"
REFUSED = error_response(400, "BadRequestError", "it cannot be", "messages")


class Keys:
    ring = KeyRing(())


class Ingress(InferenceIngress):
    """The real one, before a decode tier that replays pieces.

    A number among them is a pause, seconds; `HEARD` is one until the client has read two comments in it.
    """

    def __init__(self, limits):
        self._limits, self._tiers, self._model_cards = limits, DEFAULT_TIERS, {}
        self._turns = ReadingTurns(limits.max_bytes_in_flight)
        self._instruments = SimpleNamespace(count=lambda *_, **__: None, observe=lambda *_, **__: None)
        self._models = SimpleNamespace(named_by=self._named_by)
        self.pieces, self.ended, self.is_left = [], [], False
        self.heard = 0

    def _named_by(self, body):
        body.model = "tiny"
        return SimpleNamespace(
            config=ModelConfig("tiny", 100, None, {}, shows_usage=False),
            placement=SimpleNamespace(place=self._place, job_ended=lambda _: None),
            decode=SimpleNamespace(answer=self._answer),
            tell=self.ended.append,
        )

    async def _place(self, _):
        return None

    async def _answer(self, asked, context, send, delivered):
        try:
            for piece in self.pieces:
                if isinstance(piece, Exception):
                    raise piece
                if piece is HEARD:
                    until = self.heard + 2
                    while self.heard < until:  # noqa: ASYNC110 - a comment tells nobody here
                        await asyncio.sleep(INTERVAL_S / 5)
                elif isinstance(piece, float):
                    await asyncio.sleep(piece)
                else:
                    yield piece
        finally:
            self.is_left = True

    @property
    def outcomes(self):
        return [ended.outcome for ended in self.ended]


@pytest.fixture
def ingress(monkeypatch):
    """Makes one whose application answers `ingress.pieces`."""

    def made(ingress, endpoint_map, app):
        for name, route in endpoint_map.items():
            route(app)(getattr(ingress, name))
        ingress.app = app
        return ingress

    def of(*pieces, **limits):
        monkeypatch.setattr(routes, "make_fastapi_ingress", made)
        limits = LimitsConfig(**{"sse_keep_alive_s": INTERVAL_S, **limits})
        found = routes.make_ingress(Ingress(limits), Keys(), limits)
        found.pieces = pieces
        return found

    return of


def asking(ingress, path="/v1/completions", **body):
    body = {"prompt": "hi", "stream": True, **body}
    headers = [(b"content-type", b"application/json")]

    async def said():
        return json.dumps(body).encode()

    return exchange(ingress.app, "POST", path, headers, said)


async def answered(ingress, path="/v1/completions", **body):
    """The head of the answer and its events, comments among them."""
    text = ""
    async with asyncio.timeout(60), aclosing(asking(ingress, path, **body)) as pieces:
        head = await anext(pieces)
        async for piece in pieces:
            text += piece.decode()
            ingress.heard = text.count(COMMENT)
    return head, [f"{event}\n\n" for event in text.split("\n\n")[:-1]]


def error_of(event):
    return json.loads(event.removeprefix("data: "))["error"]


async def test_before_the_first_token_and_between_tokens_comments_are_sent(ingress):
    answering = ingress(HEARD, TEXT, HEARD, TEXT, TEXT, DONE)
    head, events = await answered(answering)
    assert (head.status, head.headers["x-slo-tier"]) == (200, "standard")
    assert head.headers["content-type"].startswith("text/event-stream")
    first, second = (index for index, event in enumerate(events[:-2]) if event == TEXT)
    assert first >= 2
    assert second > first + 1
    assert events[second:] == [TEXT, TEXT, DONE]
    assert {*events[:first], *events[first + 1 : second]} == {COMMENT}
    (ended,) = answering.ended
    assert ended.outcome is Outcome.FINISHED
    assert ended.ttft_s >= 2 * INTERVAL_S, "a comment is no token"


async def test_a_comment_comes_as_soon_as_nothing_has_come_for_so_long(ingress):
    begun_s = time.monotonic()
    async with aclosing(asking(ingress(20.0, TEXT, DONE))) as pieces:
        assert (await anext(pieces)).is_ok
        assert (await anext(pieces)).decode() == COMMENT
    assert INTERVAL_S <= time.monotonic() - begun_s < 10


async def test_without_the_setting_nothing_is_sent_before_the_first_token(ingress):
    assert LimitsConfig().sse_keep_alive_s is None
    answering = ingress(LONG_S, TEXT, LONG_S, DONE, sse_keep_alive_s=None)
    assert (await answered(answering))[1] == [TEXT, DONE]
    begun_s = time.monotonic()
    async with aclosing(asking(answering)) as pieces:
        await anext(pieces)
        assert time.monotonic() - begun_s >= LONG_S


async def test_an_answer_that_does_not_stream_has_no_comments(ingress):
    head, _ = await answered(ingress(LONG_S, REFUSED), stream=False)
    assert head.status == 400


@pytest.mark.parametrize(
    "refusal", [REFUSED, http_errors.decode_failed("limit")], ids=["by a replica", "here"]
)
async def test_what_is_refused_before_keeps_its_status(ingress, refusal):
    answering = ingress(refusal, sse_keep_alive_s=30.0)
    head, body = [piece async for piece in asking(answering)]
    assert head.status in (400, 503)
    assert json.loads(body)["error"]["message"]
    assert head.headers["x-slo-tier"] == "standard"


@pytest.mark.parametrize(
    ("last", "kind", "code", "outcome"),
    [
        pytest.param([REFUSED], "invalid_request_error", "invalid_value", Outcome.REJECTED, id="refused"),
        pytest.param(
            [http_errors.decode_failed("limit")],
            "service_unavailable",
            "decode_failed",
            Outcome.FAILED,
            id="nobody goes on",
        ),
        pytest.param(
            [RuntimeError("a path")], "server_error", "internal_error", Outcome.FAILED, id="unexpected"
        ),
        pytest.param([], "server_error", "internal_error", Outcome.FAILED, id="nothing"),
    ],
)
async def test_an_error_after_comments_is_the_streams_last_event(ingress, last, kind, code, outcome):
    answering = ingress(HEARD, *last)
    head, (*comments, event) = await answered(answering)
    assert head.status == 200
    assert set(comments) == {COMMENT}
    error = error_of(event)
    assert (error["type"], error["code"]) == (kind, code)
    assert "path" not in error["message"]
    assert answering.outcomes == [outcome]


async def test_a_stream_that_fails_between_comments_ends_with_the_error(ingress):
    answering = ingress(TEXT, HEARD, http_errors.decode_failed("limit"))
    _, (text, *comments, event) = await answered(answering)
    assert (text, set(comments), error_of(event)["code"]) == (TEXT, {COMMENT}, "decode_failed")
    assert answering.outcomes == [Outcome.FAILED]


async def test_in_the_responses_api_too(ingress):
    answering = ingress(HEARD, CHAT, HEARD, DONE)
    body = {"prompt": None, "input": "hi"}
    _, events = await answered(answering, "/v1/responses", **body)
    assert events[:2] == [COMMENT, COMMENT]
    begun = next(index for index, event in enumerate(events) if "response.created" in event)
    assert COMMENT in events[begun:]
    assert "response.completed" in events[-1]
    answering.pieces = (HEARD, REFUSED)
    _, (*comments, event) = await answered(answering, "/v1/responses", **body)
    assert set(comments) == {COMMENT}
    found = json.loads(event.split("\n")[1].removeprefix("data: "))
    assert (found["type"], found["param"]) == ("error", "input"), "the field that was sent"


@pytest.mark.parametrize("read", [1, 2, 4], ids=["before", "at the first", "after some"])
async def test_a_client_that_leaves_a_stream_that_waits_leaves_the_decode_tier(ingress, read):
    answering = ingress(60.0, TEXT, DONE)
    async with aclosing(asking(answering)) as pieces:
        for _ in range(read):
            await anext(pieces)
    assert answering.is_left
    assert answering.outcomes == [Outcome.CANCELLED]


async def test_a_client_that_leaves_before_the_answer_begins_leaves_the_decode_tier(ingress):
    answering = ingress(60.0, TEXT, DONE, sse_keep_alive_s=30.0)

    async def read():
        return [piece async for piece in asking(answering)]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.1)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert answering.is_left
    assert answering.outcomes == [Outcome.CANCELLED]


async def test_an_answer_that_nobody_begins_to_read_leaves_the_decode_tier(ingress):
    """Its client leaves when its head is sent: nothing has asked for an event by then."""
    answering = ingress(60.0, TEXT, DONE)
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    asked = asyncio.Queue()
    asked.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message):
        raise OSError("gone")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await asyncio.gather(answering.app(scope, asked.get, send), return_exceptions=True)
    async with asyncio.timeout(5):
        while not answering.is_left:
            gc.collect()
            await asyncio.sleep(0.01)
    assert answering.outcomes == [Outcome.CANCELLED]


async def test_what_the_client_does_not_see_keeps_nothing_open(ingress):
    hidden = [HIDDEN, INTERVAL_S / 2] * 8
    _, events = await answered(ingress(TEXT, *hidden, TEXT, DONE))
    assert COMMENT in events[1:-2]
    assert [event for event in events if event != COMMENT] == [TEXT, TEXT, DONE]


async def test_where_nothing_was_sent_for_so_long_already_a_comment_is_due():
    async def stream():
        yield TEXT

    async with asyncio.timeout(5):
        events = [event async for event in kept_alive(stream(), 60.0, is_due=True)]
    assert events == [COMMENT, TEXT]


async def grpc_answers(ingress):
    context = Context()
    answers = [answer async for answer in ingress.CompleteStream(pb.CompleteRequest(prompt="hi"), context)]
    return answers, context


async def test_over_grpc_comments_are_left_out(ingress):
    answers, context = await grpc_answers(ingress(LONG_S, TEXT, LONG_S, TEXT, DONE))
    assert [chunk.choices[0].text for answer in answers for chunk in answer.chunks] == ["a", "a"]
    assert all(answer.chunks for answer in answers)
    assert context.code is None


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (REFUSED, grpc.StatusCode.INVALID_ARGUMENT),
        (error_response(429, TOO_MANY_GRAMMARS, "too many"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (http_errors.decode_failed("limit"), grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["invalid", "too many", "failed"],
)
async def test_over_grpc_an_error_after_comments_has_the_code_that_it_has_before(ingress, refused, code):
    for pause_s in (0.0, LONG_S):
        answers, context = await grpc_answers(ingress(pause_s, refused))
        assert not answers[-1].chunks
        assert context.code is code
