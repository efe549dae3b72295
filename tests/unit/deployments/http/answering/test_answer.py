"""What a client gets of an answer, and how its request is said to have ended, when no stream begins."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from played_calls import call_of
from ray.exceptions import TaskCancelledError
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest, CompletionResponse
from starlette.responses import StreamingResponse

from decode_node.answers import ENDED_BY_GRAMMAR, Piece, error_response
from deployments.http import accounting
from deployments.http import errors as http_errors
from deployments.http.accounting import Identity, RequestRecord
from deployments.http.answering import event_stream
from deployments.http.answering.answer import generate, respond
from deployments.http.continuing.decode_tier import DecodeTier
from deployments.http.continuing.stream_watch import DecodeFailedError
from deployments.http.errors import HTTPError
from deployments.http.messages import request as messages
from deployments.http.placing.asked import Asked
from deployments.http.responses import request as responses
from deployments.http.token_meter import TokenMeter
from router.messages import PlacementRequested
from slo.admission.tenant_limits import NO_USAGE, Usage
from slo.objectives import Objective
from slo.outcomes import Outcome
from slo.replacement import FailureCause
from slo.request import JobId, RequestContext
from slo.tiers import STANDARD

HEADERS = {"x-slo-tier": "standard"}
TOKEN = 'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = "data: [DONE]\n\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
WHOLE = CompletionResponse(model="tiny", choices=[], usage=USAGE)
COMPLETION = CompletionRequest(model="tiny", prompt="hi")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "required",
}
FORMAT = {"response_format": {"type": "json_object"}}


class Record:
    request_id, job_id = "r", "j"

    def __init__(self):
        self.outcomes, self.usages = [], []

    def event(self, text):
        return text

    def unread(self, seconds):
        pass

    def answered(self, usage):
        self.usages.append(usage)

    def end(self, outcome):
        self.outcomes.append(outcome)

    def traced(self, error):
        error.trace_id = "t"
        return error


class Tier:
    """Replays the pieces of an answer."""

    def __init__(self, *pieces):
        self.pieces = pieces
        self.is_left = False

    async def answer(self, asked, context, send, delivered):
        try:
            for piece in self.pieces:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.is_left = True


async def answered(record, *pieces, wording=None, body=COMPLETION):
    generated = generate(Tier(*pieces), None, None, None, record)
    return await respond(generated, record, HEADERS, wording, body=body)


async def test_an_answer_that_comes_as_a_whole():
    record = Record()
    response = await answered(record, WHOLE)
    assert json.loads(response.body)["usage"]["completion_tokens"] == 4
    assert response.headers["x-slo-tier"] == "standard"
    assert record.outcomes == [Outcome.FINISHED]
    assert record.usages == [WHOLE.usage]


async def test_in_the_words_of_another_api():
    wording = SimpleNamespace(whole=lambda answer: {"said": answer["model"]})
    assert json.loads((await answered(Record(), WHOLE, wording=wording)).body) == {"said": "tiny"}


@pytest.mark.parametrize(
    ("body", "field"), [(COMPLETION, "logprobs"), (ChatCompletionRequest(**CHAT), "top_logprobs")]
)
@pytest.mark.parametrize("keep_alive_s", [None, 0.001])
async def test_a_refusal_of_too_many_log_probabilities_names_the_field_that_was_sent(
    body, field, keep_alive_s
):
    """A chat's `logprobs` says only whether there are some."""
    refusal = error_response(400, "BadRequestError", "Requested sample logprobs of 21", "logprobs")

    class Late(Tier):
        async def answer(self, asked, context, send, delivered):
            await asyncio.sleep(0.05)
            yield refusal

    pieces = generate(Late(), None, None, None, Record())
    response = await respond(pieces, Record(), dict(HEADERS), None, keep_alive_s, body=body)
    if keep_alive_s is None:
        said = response.body.decode()
    else:
        said = "".join([event async for event in response.body_iterator])
    assert f'"param":"{field}"' in said


async def test_an_answer_that_comes_piece_by_piece():
    record = Record()
    response = await answered(record, TOKEN, DONE)
    assert isinstance(response, StreamingResponse)
    assert (response.media_type, response.headers["x-slo-tier"]) == ("text/event-stream", "standard")
    assert record.outcomes == [], "it has only begun"
    assert [event async for event in response.body_iterator] == [TOKEN, DONE]
    assert record.outcomes[0] is Outcome.FINISHED


@pytest.mark.parametrize(
    ("code", "kind", "outcome"),
    [
        (400, "BadRequestError", Outcome.REJECTED),
        (429, "dropped", Outcome.EVICTED),
        (503, "prefill_failed", Outcome.FAILED),
    ],
)
async def test_what_its_replicas_refuse_has_taken_nothing(code, kind, outcome):
    record = Record()
    response = await answered(record, error_response(code, kind, "it cannot be"))
    error = json.loads(response.body)["error"]
    assert (response.status_code, error["message"], error["trace_id"]) == (code, "it cannot be", "t")
    assert response.headers["x-slo-tier"] == "standard"
    assert record.outcomes == [outcome]
    assert record.usages == [None]


@pytest.mark.parametrize("begun", [(), (TOKEN,)], ids=["refused", "in its stream"])
@pytest.mark.parametrize(
    ("body", "api", "field"),
    [
        (CompletionRequest(model="tiny", prompt="hi", **FORMAT), None, "response_format"),
        (ChatCompletionRequest(**CHAT, structured_outputs={"regex": "a"}), None, "structured_outputs"),
        (ChatCompletionRequest(**CHAT, **FORMAT), None, "response_format"),
        (ChatCompletionRequest(**CHAT, **TOOLS), None, "tools"),
        (ChatCompletionRequest(**CHAT, **FORMAT), responses, "text.format"),
        (ChatCompletionRequest(**CHAT, **FORMAT), messages, "output_config.format"),
        (ChatCompletionRequest(**CHAT, **TOOLS), messages, "tools"),
    ],
)
async def test_a_grammar_that_cannot_be_kept_to_is_named_by_the_field_that_was_sent(begun, body, api, field):
    refusal = error_response(400, ENDED_BY_GRAMMAR, "it cannot go on", "structured_outputs")
    wording = api and SimpleNamespace(path="", field=api.field_here, events=lambda told: told)
    response = await answered(Record(), *begun, refusal, wording=wording, body=body)
    if begun:
        *_, last = [event async for event in response.body_iterator]
        said = last.removeprefix("data: ")
    else:
        said = response.body
    assert json.loads(said)["error"]["param"] == field


async def test_in_another_api_a_refusal_names_that_apis_field():
    refused = error_response(400, "BadRequestError", "too long", "messages")
    wording = SimpleNamespace(path="/v1/responses", field=responses.field_here)
    response = await answered(Record(), refused, wording=wording)
    assert json.loads(response.body)["error"]["param"] == "input"


async def test_in_another_api_a_refusal_has_that_apis_shape():
    refused = error_response(400, "BadRequestError", "too long", "messages")
    wording = SimpleNamespace(path="/v1/messages", field=lambda name: name)
    response = await answered(Record(), refused, wording=wording)
    assert json.loads(response.body)["type"] == "error"


@pytest.mark.parametrize(
    ("pieces", "status", "outcome"),
    [
        pytest.param([], 500, Outcome.FAILED, id="nothing"),
        pytest.param([RuntimeError("with a path in it")], 500, Outcome.FAILED, id="an unexpected error"),
        pytest.param([http_errors.decode_failed("limit")], 503, Outcome.FAILED, id="no replica goes on"),
    ],
)
async def test_an_answer_that_never_begins(pieces, status, outcome):
    record = Record()
    with pytest.raises(HTTPError) as failed:
        await answered(record, *pieces)
    error = failed.value
    assert (error.status, error.trace_id, record.outcomes[0]) == (status, "t", outcome)
    assert record.usages == [None], "it has taken nothing"
    assert error.headers["x-slo-tier"] == "standard"
    assert "path" not in error.message


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("failure", [RuntimeError(), http_errors.decode_failed("no_replica")], ids=repr)
async def test_what_the_server_fails_is_given_back(streams, failure):
    ended = []
    record = RequestRecord(
        SimpleNamespace(count=lambda *_, **__: None),
        Identity(JobId("j"), "r", "acme", "tiny", streams),
        Objective(STANDARD, None, None),
        0.0,
        ended=ended.append,
        tell=lambda _: None,
    )
    body = CompletionRequest(model="tiny", prompt="hi", stream=streams)
    record.meter = TokenMeter(body, admitted=Usage(3, 32_000))
    with pytest.raises(HTTPError):
        await answered(record, failure)
    assert [end.used for end in ended] == [NO_USAGE]


@pytest.mark.parametrize("failure", [RuntimeError(), http_errors.decode_failed("limit")], ids=repr)
async def test_of_a_stream_that_fails_late_counts_what_it_has_brought(failure):
    record = Record()
    response = await answered(record, TOKEN, failure)
    assert len([event async for event in response.body_iterator]) > 1
    assert record.outcomes[0] is Outcome.FAILED
    assert record.usages == []


@pytest.mark.parametrize("gone", [asyncio.CancelledError(), TaskCancelledError()], ids=repr)
async def test_a_client_that_leaves_before_the_first_piece(gone):
    record = Record()
    with pytest.raises(type(gone)):
        await answered(record, gone)
    assert record.outcomes == [Outcome.CANCELLED]


async def test_a_stream_that_its_client_leaves_leaves_the_decode_tier():
    record, tier = Record(), Tier(TOKEN, TOKEN, DONE)
    pieces = generate(tier, None, None, None, record)
    await anext(pieces)
    await pieces.aclose()
    assert tier.is_left
    assert record.outcomes == [Outcome.CANCELLED]


async def ended_early(monkeypatch, *pieces, ends, every_s):
    """What is told of a stream whose pieces come so far apart and that nothing limits, and of its log."""
    now_s, told, lines = 0.0, [], []
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(accounting, "time", clock)
    monkeypatch.setattr(event_stream, "time", clock)
    monkeypatch.setattr(accounting.logs, "event", lambda name, **fields: lines.append((name, fields)))
    body = CompletionRequest(model="tiny", prompt="hi", stream=True)
    record = RequestRecord(
        SimpleNamespace(count=lambda *_, **__: None, observe=lambda *_, **__: None),
        Identity(JobId("j"), "r", "acme", "tiny", streams=True),
        Objective(STANDARD, None, tpot_s=0.03),
        0.0,
        ended=lambda _: None,
        tell=told.append,
    )
    record.meter = TokenMeter(body, None)

    class Watch:
        async def pieces(self, responses, replica, **_):
            nonlocal now_s
            for piece in pieces:
                yield piece
                now_s += every_s
            if ends is Outcome.EVICTED:
                yield error_response(429, "dropped", "it is promised nothing")
            if ends is Outcome.FAILED:
                raise DecodeFailedError(FailureCause.REPLICA_DIED)

    placement = SimpleNamespace(lost=lambda _: None)
    tier = DecodeTier(placement, Watch(), 0, SimpleNamespace(count=lambda *_, **__: None))
    placed = PlacementRequested(
        JobId("j"), record._objective, explicit_deadline=False, prompt_tokens=2, prompt_bytes=0
    )
    context = RequestContext(JobId("j"), "r", STANDARD, None, prefill_replica=None, decode_replica=None)
    calls = call_of(SimpleNamespace(cancel=lambda: None))
    generated = generate(tier, Asked(body, placed, 0.0), context, lambda *_: calls, record)
    response = await respond(generated, record, HEADERS, None, body=body)
    for _ in pieces:
        await anext(response.body_iterator)
    if ends is not Outcome.CANCELLED:
        assert [event async for event in response.body_iterator]
    await response.body_iterator.aclose()
    (fields,) = [fields for name, fields in lines if name == "request_ended"]
    return told[0], fields


EARLY = pytest.mark.parametrize("ends", [Outcome.CANCELLED, Outcome.EVICTED, Outcome.FAILED])


@EARLY
async def test_a_stream_that_ends_early_is_timed_by_the_tokens_that_its_events_bring(monkeypatch, ends):
    """By the events it would be three times as slow as it is, and a cancelled one a miss."""
    pieces = [Piece(TOKEN, [1]), *[Piece(TOKEN, [1, 2, 3], bound="grammar")] * 9]
    told, line = await ended_early(monkeypatch, *pieces, ends=ends, every_s=0.036)
    assert told.outcome is ends
    assert told.tpot_s == pytest.approx(0.012)
    assert line["tokens"] == 28
    if ends is Outcome.CANCELLED:
        assert told.attained is None, "nothing was missed"


async def test_a_stream_that_its_client_leaves_and_that_is_slow_has_missed_its_objective(monkeypatch):
    pieces = [Piece(TOKEN, [1]), *[Piece(TOKEN, [1, 2, 3])] * 9]
    told, _ = await ended_early(monkeypatch, *pieces, ends=Outcome.CANCELLED, every_s=0.12)
    assert (told.tpot_s, told.attained) == (pytest.approx(0.04), False)


@EARLY
async def test_a_stream_that_ends_early_has_no_tpot_where_nobody_has_counted_its_tokens(monkeypatch, ends):
    """As of several answers, whose events may bring several tokens as well."""
    pieces = [Piece(TOKEN, bound="several_sequences")] * 10
    told, line = await ended_early(monkeypatch, *pieces, ends=ends, every_s=0.036)
    assert (told.tpot_s, line["tpot_s"], line["tokens"]) == (None, None, 10)
