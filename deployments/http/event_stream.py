"""The server-sent events of one streamed answer.

Owns how an answer's pieces become events, and when a stream counts as whole: once `[DONE]` has been handed
over. Many clients close the connection as soon as they have read it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from decode_node.answers import EngineError, error_in, is_done
from deployments.http import errors as http_errors
from deployments.http.accounting import RequestRecord
from deployments.http.errors import HTTPError
from slo.outcomes import Outcome


async def events(
    first: Any, rest: AsyncGenerator[Any, None], record: RequestRecord
) -> AsyncGenerator[str, None]:
    """The stream's server-sent events, measured as they pass; an error that comes late is its last event."""
    outcome = Outcome.FINISHED
    try:
        async for piece in _joined(first, rest):
            if (error := error_in(piece)) is not None:
                outcome = _late_end(error)
            for event in _texts(piece):
                if not (text := record.event(event)):
                    continue
                if is_done(text):
                    record.end(outcome)
                yield text
        record.end(outcome)
    except HTTPError as error:
        yield _error_event(error)
    finally:
        record.end(Outcome.CANCELLED)
        await rest.aclose()


async def _joined(first: Any, rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    yield first
    async for piece in rest:
        yield piece


def _late_end(error: EngineError) -> Outcome:
    """How a request ends whose answer breaks off: whatever it is, the server has not kept its word."""
    ended = http_errors.ended_by(http_errors.engine_error(error))
    return ended if ended is Outcome.EVICTED else Outcome.FAILED


def _texts(piece: Any) -> list[str]:
    if not isinstance(piece, list | str) and (error := error_in(piece)) is not None:
        return [_error_event(http_errors.engine_error(error))]
    return [str(text) for text in piece] if isinstance(piece, list) else [str(piece)]


def _error_event(error: HTTPError) -> str:
    return f"data: {bytes(error.response().body).decode()}\n\n"
