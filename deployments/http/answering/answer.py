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
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import TaskCancelledError
from starlette.responses import JSONResponse, Response, StreamingResponse

from decode_node.answers import error_in
from deployments.http import errors as http_errors
from deployments.http.accounting import RequestRecord
from deployments.http.answering.event_stream import events
from deployments.http.continuing.decode_tier import DecodeTier
from deployments.http.errors import HTTPError
from deployments.http.placing.asked import Asked
from deployments.http.responses import request as responses
from deployments.http.responses.answer import ResponseWording
from slo.outcomes import Outcome
from slo.request import RequestContext
from telemetry import logs

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponseGenerator

_SSE: Final = "text/event-stream"


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
    has_begun = False
    try:
        async with aclosing(tier.answer(asked, context, send)) as pieces:
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
    wording: ResponseWording | None,
) -> Response:
    """Answer with the first piece if it is all there is, else with the stream that it begins.

    Args:
        pieces: Of the answer.
        record: The request's account.
        headers: What the client is told of its place, whatever the answer.
        wording: Of the request's own API; None for that of the pieces.

    Raises:
        HTTPError: when there is no first piece.
    """
    try:
        first = await anext(pieces)
    except HTTPError as refusal:
        refusal.headers.update(headers)
        raise
    except StopAsyncIteration:
        record.answered(None)
        failed = _failed(record, "the decode tier has ended its answer without a piece of it")
        failed.headers.update(headers)
        raise failed from None
    if (error := error_in(first)) is not None:
        failed = record.traced(http_errors.engine_error(error))
        if wording is not None:
            responses.renamed(failed)
        record.answered(None)
        record.end(http_errors.ended_by(failed))
        failed.headers.update(headers)
        return failed.response()
    if hasattr(first, "model_dump"):
        record.answered(first.usage)
        record.end(Outcome.FINISHED)
        answer = first.model_dump()
        return JSONResponse(answer if wording is None else wording.whole(answer), headers=headers)
    stream = events(first, pieces, record)
    told = stream if wording is None else wording.events(stream)
    return StreamingResponse(told, media_type=_SSE, headers=headers)


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
