"""What a decode replica's tokenizer answers alone: the tokens of a text or a chat, or the text of tokens.

Neither the router nor a tenant's limits are asked about it, and one thread of a replica does it for all,
beside the one for prompts (`decode_node.tokenizing.conversions.conversions_apart`). Owns how many of them a
tenant has at a time, and how long one may take.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import TaskCancelledError
from starlette.responses import JSONResponse, Response

from decode_node.answers import NOT_TAKEN, error_in
from decode_node.tier_calls import REPLICA_ERRORS, cancel_call
from deployments.http import errors as http_errors
from slo.errors import NO_REPLICA_RETRY_S, Rejected, RejectionReason
from telemetry import logs
from telemetry.reporting.answering import answer_within

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponseGenerator
    from starlette.datastructures import State

AT_ONCE: Final = 2
"""Conversions that a tenant may have under way; few, as one thread of a replica does those of all tenants."""
ANSWERED_S: Final = 10.0
"""Serve keeps what it has no replica for; this is how long that is waited for."""


def said_whole(answer: Any) -> dict[str, Any]:
    """All of a replica's answer."""
    return dict(answer.model_dump())


class Conversions:
    """Answers an ingress's requests for tokens or text, a few of a tenant at a time.

    Args:
        answered_s: How long one may take.
    """

    def __init__(self, answered_s: float = ANSWERED_S) -> None:
        self._answered_s = answered_s
        self._ongoing: Counter[str] = Counter()

    async def answer(
        self,
        send: Callable[[], DeploymentResponseGenerator[Any]],
        field: str,
        state: State,
        say: Callable[[Any], dict[str, Any]] = said_whole,
    ) -> Response:
        """What a decode replica answers.

        Args:
            send: Calls one.
            field: Of the request, which has what is converted.
            state: Of the request.
            say: What of a replica's answer the client is told.

        Raises:
            HTTPError: when its tenant has as many as it may, and when no answer comes, or an error.
        """
        tenant: str = state.tenant.name
        if self._ongoing[tenant] >= AT_ONCE:
            raise http_errors.too_many_conversions(AT_ONCE)
        self._ongoing[tenant] += 1
        try:
            try:
                answer = await self._first(send(), field, state.request_id)
            except REPLICA_ERRORS:  # nothing has been done that may not be done again
                answer = await self._first(send(), field, state.request_id)
        except REPLICA_ERRORS:
            raise http_errors.rejected(Rejected(RejectionReason.NO_REPLICA, NO_REPLICA_RETRY_S), {}) from None
        finally:
            self._ongoing -= Counter([tenant])
        if (refused := error_in(answer)) is not None:
            raise http_errors.engine_error(refused)
        return JSONResponse(say(answer))

    async def _first(self, responses: DeploymentResponseGenerator[Any], field: str, request_id: str) -> Any:
        answer = None
        try:
            answer = await answer_within(anext(aiter(responses)), self._answered_s)
        except (asyncio.CancelledError, TaskCancelledError, *REPLICA_ERRORS):
            raise
        except TimeoutError:
            raise http_errors.rejected(Rejected(RejectionReason.NO_REPLICA, NO_REPLICA_RETRY_S), {}) from None
        except Exception as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, NOT_TAKEN):
                raise http_errors.bad_body(str(cause), field) from error
            logs.event("request_failed", level=logging.ERROR, request_id=request_id, error=repr(error)[:2000])
            raise http_errors.internal_error(request_id) from error
        finally:
            if answer is None:
                cancel_call(responses)
        return answer
