"""A request's answer: its pieces from the decode tier, and the HTTP response that they make.

Owns how a request ends whose answer comes as a whole, is refused by its replicas or never begins. The end of
a stream that has begun is `event_stream`'s; how pieces go on when their replica fails is
`deployments.http.continuing`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import TaskCancelledError
from starlette.responses import JSONResponse, Response, StreamingResponse

from decode_node.answers import EngineError, error_in
from deployments.http import errors as http_errors
from deployments.http.accounting import RequestRecord
from deployments.http.answering.event_stream import events, read_by_client
from deployments.http.answering.keep_alive import NOTHING_YET, kept_alive, or_nothing_yet
from deployments.http.answering.wording import Wording, renamed
from deployments.http.body.asks import grammar_field
from deployments.http.continuing.decode_tier import DecodeTier
from deployments.http.continuing.delivered import Delivered
from deployments.http.errors import HTTPError
from deployments.http.placing.asked import Asked
from slo.outcomes import Outcome
from slo.request import RequestContext
from telemetry import logs

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponseGenerator

_SSE: Final = "text/event-stream"
_GRAMMAR: Final = "structured_outputs"
"""The field that engines name whatever says what an answer must conform to."""
_OF_CHATS: Final = {"logprobs": "top_logprobs"}
"""Numbers that a completion asks for by these names, and what a chat calls them."""


async def generate(
    tier: DecodeTier,
    asked: Asked,
    context: RequestContext,
    send: Callable[[Any, RequestContext], DeploymentResponseGenerator[Any]],
    record: RequestRecord,
) -> AsyncGenerator[Any, None]:
    """The answer's pieces; notes what ends it early.

    Args:
        tier: Who generates it.
        asked: The request.
        context: Where it was placed.
        send: Calls the decode tier with a request and its context.
        record: Its account.

    Raises:
        HTTPError: when there is no answer, or no more of it.
    """
    has_begun, delivered = False, Delivered()
    record.delivered_tokens = lambda: delivered.tokens
    try:
        async with aclosing(tier.answer(asked, context, send, delivered)) as pieces:
            async for piece in pieces:
                has_begun = True
                yield piece
    except (asyncio.CancelledError, GeneratorExit, TaskCancelledError):
        record.end(Outcome.CANCELLED)
        raise
    except HTTPError as error:
        if not has_begun:
            record.answered(None)
        record.end(http_errors.ended_by(error))
        raise record.traced(error) from None
    except Exception as error:
        if not has_begun:
            record.answered(None)
        raise _failed(record, repr(error)) from error


async def respond(
    pieces: AsyncGenerator[Any, None],
    record: RequestRecord,
    headers: dict[str, str],
    wording: Wording | None,
    keep_alive_s: float | None = None,
    *,
    body: Any,
) -> Response:
    """Answer with the first piece if it is all there is, else with the stream that it begins.

    Args:
        pieces: Of the answer.
        record: The request's account.
        headers: What the client is told of its place, whatever the answer.
        wording: Of the request's own API; None for that of the pieces.
        keep_alive_s: How long nothing may be sent of a stream; None for any time, and where it is none. Once
            it has passed without a first piece the stream begins, and an error is its last event.
        body: vLLM's request, of which engines name fields as a completion has them, and one for all grammars.

    Raises:
        HTTPError: when there is no first piece.
    """
    field = partial(_field, body, wording)
    if keep_alive_s is not None:
        pieces = or_nothing_yet(pieces, keep_alive_s)
    try:
        first = await anext(pieces)
    except HTTPError as refusal:
        refusal.headers.update(headers)
        raise
    except StopAsyncIteration:
        failed = _without_answer(record)
        failed.headers.update(headers)
        raise failed from None
    if is_late := first is NOTHING_YET:
        first, pieces = [], _begun(pieces, record, field)
    elif (error := error_in(first)) is not None:
        failed = _refused(error, record, field)
        failed.headers.update(headers)
        return failed.response("" if wording is None else wording.path)
    elif hasattr(first, "model_dump"):
        record.answered(first.usage)
        record.end(Outcome.FINISHED)
        answer = first.model_dump()
        return JSONResponse(answer if wording is None else wording.whole(answer), headers=headers)
    told = events(first, pieces, record, field)
    if wording is not None:
        told = wording.events(told)
    if keep_alive_s is not None:
        told = kept_alive(told, keep_alive_s, is_due=is_late)
    return StreamingResponse(read_by_client(told, record), media_type=_SSE, headers=headers)


def _field(body: Any, wording: Wording | None, name: str) -> str:
    """What the client has called a field that its replicas refuse."""
    if name == _GRAMMAR:
        name = grammar_field(body) or "tools"
    elif hasattr(body, "messages"):
        name = _OF_CHATS.get(name, name)
    return name if wording is None else wording.field(name)


async def _begun(
    pieces: AsyncGenerator[Any, None], record: RequestRecord, field: Callable[[str], str]
) -> AsyncGenerator[Any, None]:
    """The pieces of an answer whose stream began before the first of them, which may be a refusal.

    Raises:
        HTTPError: when there is no answer, or no more of it.
    """
    async with aclosing(pieces):
        first = await anext(pieces, None)
        if first is None:
            raise _without_answer(record)
        if (error := error_in(first)) is not None:
            raise _refused(error, record, field)
        yield first
        async for piece in pieces:
            yield piece


def _refused(error: EngineError, record: RequestRecord, field: Callable[[str], str]) -> HTTPError:
    """What a request is answered with that its replicas refuse; it has taken nothing."""
    failed = record.traced(http_errors.engine_error(error))
    renamed(failed, field)
    record.answered(None)
    record.end(http_errors.ended_by(failed))
    return failed


def _without_answer(record: RequestRecord) -> HTTPError:
    """What a request is answered with whose answer has no piece."""
    record.answered(None)
    return _failed(record, "the decode tier has ended its answer without a piece of it")


def _failed(record: RequestRecord, why: str) -> HTTPError:
    """What a request is answered with that has failed here; the log has the reason."""
    record.end(Outcome.FAILED)
    logs.event(
        "request_failed",
        level=logging.ERROR,
        request_id=record.request_id,
        job_id=record.job_id,
        error=why[:2000],
    )
    return record.traced(http_errors.internal_error(record.request_id))
