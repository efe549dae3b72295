"""The server-sent events of one streamed answer.

Owns how an answer's pieces become events, and when a stream counts as whole: once `[DONE]` has been handed
over. Many clients close the connection as soon as they have read it. An event is handed over when the next
one is asked for: where much is unread, that is when its client has read on, over HTTP and over gRPC.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from decode_node.answers import ENDED_BY_GRAMMAR, EngineError, error_in, is_done, parts_of
from deployments.http import errors as http_errors
from deployments.http.accounting import RequestRecord
from deployments.http.answering.wording import renamed
from deployments.http.errors import HTTPError
from slo.outcomes import Outcome


async def events(
    first: Any, rest: AsyncGenerator[Any, None], record: RequestRecord, field: Callable[[str], str]
) -> AsyncGenerator[str, None]:
    """The stream's server-sent events, measured as they pass; an error that comes late is its last event.

    Args:
        first: The first piece of the answer.
        rest: The others.
        record: The request's account.
        field: What the client has called a field that its replicas refuse.
    """
    try:
        async for part in _parts(first, rest):
            if (error := error_in(part)) is not None:
                record.end(_late_end(error))
                failed = record.traced(http_errors.engine_error(error))
                renamed(failed, field)
                yield _error_event(failed)
                return
            if not (text := record.event(str(part))):
                continue
            if is_done(text):
                record.end(Outcome.FINISHED)
            yield text
        record.end(Outcome.FINISHED)
    except HTTPError as error:
        yield _error_event(error)
    finally:
        record.end(Outcome.CANCELLED)
        await rest.aclose()


async def read_by_client(
    stream: AsyncGenerator[str, None], record: RequestRecord
) -> AsyncGenerator[str, None]:
    """The same events, as they are sent; the time for which each waits to be taken is not the server's."""
    async with aclosing(stream):
        async for text in stream:
            offered_s = time.monotonic()
            try:
                yield text
            finally:
                record.unread(time.monotonic() - offered_s)


async def _parts(first: Any, rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    for part in parts_of(first):
        yield part
    async for piece in rest:
        for part in parts_of(piece):
            yield part


def _late_end(error: EngineError) -> Outcome:
    """How a request ends whose answer breaks off.

    Unless others or its own grammar have ended it, the server has not kept its word, whatever it is.
    """
    ended = http_errors.ended_by(http_errors.engine_error(error))
    is_told = ended is Outcome.EVICTED or error.type == ENDED_BY_GRAMMAR
    return ended if is_told else Outcome.FAILED


def _error_event(error: HTTPError) -> str:
    return f"data: {bytes(error.response().body).decode()}\n\n"
