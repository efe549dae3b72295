"""Every error that the HTTP API answers with, in OpenAI's shape.

Owns the mapping from what went wrong to status, type, `param` and `code`. `param` names the field at fault,
spelt as the client spelt it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from slo.errors import RejectionReason
from slo.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.decisions import Rejected
    from slo.errors import AuthenticationError, FieldError


class HTTPError(Exception):
    """An error answer: raised anywhere below the ingress, answered by its exception handler.

    `outcome` is set when the answer ends a request that was never admitted, so that it is counted as such.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.outcome = outcome

    def response(self) -> JSONResponse:
        """The answer itself."""
        body = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": body}, status_code=self.status, headers=self.headers)


def bad_field(error: FieldError) -> HTTPError:
    """400 for a field that cannot be served."""
    return _refusal(400, str(error), param=error.field, code="invalid_value")


def bad_body(message: str, param: str | None = None) -> HTTPError:
    """400 for a body that does not have the API's shape; `param` names the field at fault, if one is."""
    return _refusal(400, message, param=param, code="invalid_value")


def unauthorized(error: AuthenticationError) -> HTTPError:
    """401."""
    return HTTPError(
        401,
        str(error),
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
        outcome=Outcome.REJECTED,
    )


def too_large(limit_bytes: int) -> HTTPError:
    """413."""
    return _refusal(413, f"the body is larger than {limit_bytes} bytes", code="body_too_large")


def unknown_model(model: str, known: list[str]) -> HTTPError:
    """404 for a model that is not served."""
    message = f"the model {model!r} is not served here; known are {', '.join(known)}"
    return _refusal(404, message, param="model", code="model_not_found")


def rejected(decision: Rejected, headers: Mapping[str, str]) -> HTTPError:
    """429 for a deadline that nobody can meet, 503 when there is nobody; `headers` say what was asked."""
    retry_after = {**headers, "retry-after": str(max(1, math.ceil(decision.retry_after_s)))}
    if decision.reason is RejectionReason.NO_REPLICA:
        message = "no replica is ready to take the request"
        return HTTPError(
            503,
            message,
            kind="service_unavailable",
            code=decision.reason.value,
            headers=retry_after,
            outcome=Outcome.SHED,
        )
    assert decision.predicted_ttft_s is not None
    assert decision.ttft_budget_s is not None
    message = (
        f"the first token would come after {decision.predicted_ttft_s * 1e3:.0f} ms and is due after "
        f"{decision.ttft_budget_s * 1e3:.0f} ms; retry later, or ask for a longer x-slo-ttft-ms"
    )
    return HTTPError(
        429,
        message,
        kind="overloaded_error",
        code=decision.reason.value,
        headers=retry_after,
        outcome=Outcome.SHED,
    )


def engine_error(error: Any) -> HTTPError:
    """What an engine refused, with its own status."""
    status = int(error.code)
    return HTTPError(
        status,
        error.message,
        kind="invalid_request_error" if status < 500 else "server_error",  # noqa: PLR2004 - HTTP classes
        param=getattr(error, "param", None),
        code="invalid_value" if status < 500 else "engine_error",  # noqa: PLR2004 - HTTP classes
    )


def internal_error(request_id: str) -> HTTPError:
    """500; the details are in the log under the request id."""
    message = f"the server failed to answer; its log has the details under request id {request_id}"
    return HTTPError(500, message, kind="server_error", code="internal_error")


def no_route(status: int, detail: str) -> HTTPError:
    """404 or 405 for a path or method that the API does not have."""
    return HTTPError(status, detail, kind="invalid_request_error", code="no_such_route")


def _refusal(status: int, message: str, *, code: str, param: str | None = None) -> HTTPError:
    return HTTPError(
        status, message, kind="invalid_request_error", param=param, code=code, outcome=Outcome.REJECTED
    )
