"""Every error that the HTTP API answers with, in OpenAI's shape, or Anthropic's where its API was asked.

Owns the mapping from what went wrong to status, type, `param` and `code`. `param` names the field at fault,
spelt as the client spelt it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse

from slo.errors import (
    NO_REPLICA_RETRY_S,
    TOO_MANY_GRAMMARS,
    AuthenticationError,
    EvictionReason,
    FieldError,
    Rejected,
    RejectionReason,
)
from slo.objectives import Objective
from slo.outcomes import Outcome, outcome_of
from slo.protocol import OTHER_PROTOCOL
from slo.replacement import ContinuationOutcome

if TYPE_CHECKING:
    from decode_node.answers import EngineError

MESSAGES_PATH: Final = "/v1/messages"
"""Of Anthropic's API, what is under it too."""


class HTTPError(Exception):
    """An error answer: raised anywhere below the ingress, answered by its exception handler.

    `outcome` is set when the answer ends a request that was never admitted, so that it is counted as such.
    `trace_id` is told to the client when the request is traced.
    """

    trace_id: str | None = None

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

    def response(self, path: str = "") -> JSONResponse:
        """The answer itself, in the shape of the API that `path` belongs to."""
        body = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        if self.trace_id is not None:
            body["trace_id"] = self.trace_id
        said = in_anthropics_words(body, self.status) if path.startswith(MESSAGES_PATH) else {"error": body}
        return JSONResponse(said, status_code=self.status, headers=self.headers)


def in_anthropics_words(error: dict[str, Any], status: int | None = None) -> dict[str, Any]:
    """An error as the messages API has it, with all that OpenAI's shape says of it.

    Args:
        error: In OpenAI's shape.
        status: Of the answer; None within a stream.
    """
    kind = _OF_STATUS.get(status or 0) or _OF_KIND.get(error["type"], error["type"])
    return {"type": "error", "error": {**error, "type": kind}}


_OF_STATUS: Final = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_OF_KIND: Final = {"server_error": "api_error", "service_unavailable": "overloaded_error"}
"""Types of Anthropic's errors, where they have other names than ours."""


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


def keys_not_read() -> HTTPError:
    """503 while nobody can tell whose a key is."""
    message = "the server cannot read its API keys; retry later, its log says why"
    return _for_now(503, message, "api_keys_not_read", Outcome.FAILED)


def origin_not_allowed(origin: str) -> HTTPError:
    """403 for a web page that may not ask."""
    message = f"web pages of {origin[:200]!r} may not ask here; limits.allowed_origins names those that may"
    return _refusal(403, message, param="origin", code="origin_not_allowed")


def too_large(limit_bytes: int) -> HTTPError:
    """413."""
    message = f"the body is larger than {limit_bytes} bytes, limits.max_body_bytes"
    return _refusal(413, message, code="body_too_large")


def encoded(encoding: str) -> HTTPError:
    """415 for a body that is compressed."""
    message = f"content-encoding: {encoding[:100]!r} is not read here; send the body uncompressed"
    refusal = _refusal(415, message, param="content-encoding", code="content_encoding")
    refusal.headers["accept-encoding"] = "identity"
    return refusal


def not_said_to_be_json() -> HTTPError:
    """400, in vLLM's words, for a body that says to be something else, or does not say what it is."""
    return bad_body("Unsupported Media Type: Only 'application/json' is allowed", "content-type")


def too_slow(limit_s: float) -> HTTPError:
    """408 for a body that does not arrive."""
    message = f"the body took longer than {limit_s:g} s to arrive, limits.body_timeout_s"
    return _refusal(408, message, code="body_timeout")


def too_much_in_flight(limit_bytes: int) -> HTTPError:
    """503 when all clients together are sending too much."""
    message = (
        f"all requests together send more than {limit_bytes} bytes at a time, limits.max_bytes_in_flight"
    )
    return _for_now(503, message, "bytes_in_flight", Outcome.SHED)


def too_many_headers(message: str) -> HTTPError:
    """431."""
    return _refusal(431, message, code="headers_too_large")


def too_many_conversions(limit: int) -> HTTPError:
    """429 for a text or tokens that a tokenizer is to convert."""
    message = f"this tenant has {limit} texts or lists of tokens under way, as many as it may; send it again"
    return _for_now(429, message, "conversions", Outcome.REJECTED)


def unknown_model(model: str, known: list[str]) -> HTTPError:
    """404 for a model that is not served."""
    message = f"the model {model[:200]!r} is not served here; known are {', '.join(known)}"
    return _refusal(404, message, param="model", code="model_not_found")


def rejected(decision: Rejected, headers: Mapping[str, str], objective: Objective | None = None) -> HTTPError:
    """503 when there is no replica, else 429; `code` is the reason, `headers` say what was asked.

    What is refused for its deadline needs its `objective`.

    The type is `rate_limit_error` for what its tenant's own limits refuse, `overloaded_error` for what the
    fleet cannot serve.
    """
    reason = decision.reason
    when = {"x-should-retry": "false"}  # OpenAI's clients would try again otherwise
    if decision.retry_after_s is not None:
        when = {"retry-after": str(max(1, math.ceil(decision.retry_after_s)))}
    is_limit = outcome_of(reason) is Outcome.REJECTED
    status, kind = 429, "rate_limit_error" if is_limit else "overloaded_error"
    if reason in (RejectionReason.NO_REPLICA, RejectionReason.NOT_SETTLED):
        status, kind = 503, "service_unavailable"
    return HTTPError(
        status,
        _why_refused(decision, objective),
        kind=kind,
        code=reason.value,
        headers={**headers, **when},
        outcome=outcome_of(reason),
    )


def _why_refused(decision: Rejected, objective: Objective | None) -> str:
    if decision.reason is RejectionReason.DEADLINE_INFEASIBLE:
        assert decision.predicted_ttft_s is not None
        assert decision.ttft_budget_s is not None
        assert objective is not None
        header = objective.budget_header(decision.ttft_budget_s)
        advice = "retry later, or ask"
        if decision.retry_after_s is None:
            advice = "not even an idle replica could be in time, so ask"
        return (
            f"the first token would come after {decision.predicted_ttft_s * 1e3:.0f} ms and is due after "
            f"{decision.ttft_budget_s * 1e3:.10g} ms; {advice} for a longer {header}"
        )
    if decision.reason in _LIMITS:
        whose, section = "this tenant", "limits"
        if decision.key_name is not None:
            whose, section = f"the key {decision.key_name!r} of this tenant", "key_limits"
        does, limit, hint = _LIMITS[decision.reason]
        return f"{whose} {does}, {section}.{limit}{hint}"
    return _REFUSALS[decision.reason]


_REFUSALS: Final[Mapping[RejectionReason, str]] = {
    RejectionReason.NO_REPLICA: "no replica is ready to take the request",
    RejectionReason.NOT_SETTLED: "the server has just started and takes no requests yet",
    RejectionReason.OVER_SHARE: "the server is busy, and this tier asks for more than its share; retry later",
    RejectionReason.RESERVED: "the server is busy, and what is left is kept for the top tier; retry later",
    RejectionReason.TENANT_SHARE: (
        "the server is busy, and this tenant asks for more than its part of the tier; retry later"
    ),
    RejectionReason.BACKLOG: "this tier has too much in the queue; retry later",
    RejectionReason.DECODE_FULL: (
        "the memory of all decode replicas is taken for longer than a request waits; retry later, or ask for "
        "fewer max_tokens"
    ),
    RejectionReason.SHED_BY_POLICY: "this tier is being shed for more valuable ones; retry later",
}
_LIMITS: Final[Mapping[RejectionReason, tuple[str, str, str]]] = {
    RejectionReason.REQUEST_RATE: ("sends more requests per second than it may", "requests_per_s", ""),
    RejectionReason.TOKEN_RATE: ("sends more prompt tokens per second than it may", "tokens_per_s", ""),
    RejectionReason.OUTPUT_TOKEN_RATE: (
        "asks for more output tokens per second than it may",
        "output_tokens_per_s",
        "; a smaller max_tokens asks for less",
    ),
    RejectionReason.CONCURRENCY: ("has as many requests under way as it may", "max_concurrent", ""),
}
"""What a tenant or a key does, and which of its limits it is."""


_RETRY_AFTER_S: Final = {
    RejectionReason.BACKLOG.value: 1,
    "prefill_failed": 1,
    EvictionReason.DEADLINE_PASSED.value: 1,
    EvictionReason.DROPPED.value: 10,
    RejectionReason.NO_REPLICA.value: NO_REPLICA_RETRY_S,
    OTHER_PROTOCOL: 1,
    TOO_MANY_GRAMMARS: 1,
}
"""Errors that our own replicas answer with, by their type, and when to come again if they do not say it."""


def engine_error(error: EngineError) -> HTTPError:
    """What an engine refused, with its own status; what its replica did not take or gave up, with the reason.

    The reason is the code, and the error's `param` then names no field: it may say when to come again.
    """
    status = error.code
    if (tardy := error.type) in _RETRY_AFTER_S:
        retry_after_s = int(error.param or _RETRY_AFTER_S[tardy])
        kind = "service_unavailable" if status >= 500 else "overloaded_error"  # noqa: PLR2004 - as below
        return HTTPError(
            status,
            error.message,
            kind="rate_limit_error" if tardy == TOO_MANY_GRAMMARS else kind,
            code=tardy,
            headers={"retry-after": str(max(1, retry_after_s))},
        )
    return HTTPError(
        status,
        error.message,
        kind="invalid_request_error" if status < 500 else "server_error",  # noqa: PLR2004 - HTTP classes
        param=error.param,
        code="invalid_value" if status < 500 else "engine_error",  # noqa: PLR2004 - HTTP classes
    )


def ended_by(failed: HTTPError) -> Outcome:
    """How a request ends that its replicas answer with an error."""
    if failed.code in set(EvictionReason):
        return Outcome.EVICTED
    if failed.code == RejectionReason.BACKLOG:
        return Outcome.SHED
    return Outcome.REJECTED if failed.status < 500 else Outcome.FAILED  # noqa: PLR2004 - HTTP classes


def request_failed(message: str) -> HTTPError:
    """500 for what an engine failed that goes on serving others."""
    return HTTPError(500, message, kind="server_error", code="engine_error")


def not_begun() -> HTTPError:
    """503 for a request that was admitted and that no decode replica has had, as none is running."""
    no_replica = RejectionReason.NO_REPLICA
    message, headers = _REFUSALS[no_replica], {"retry-after": str(_RETRY_AFTER_S[no_replica.value])}
    return HTTPError(503, message, kind="service_unavailable", code=no_replica.value, headers=headers)


def decode_failed(why: str) -> HTTPError:
    """503 for an answer whose replica has failed and that does not go on elsewhere; `why` says why not."""
    message = (
        f"the replica that generated the answer failed, and no other can go on with it ({why}); try again"
    )
    retry_s = 1
    if why == ContinuationOutcome.NO_REPLICA:
        message = (
            "the replica that generated the answer failed, and no other that can go on with it is running; "
            "try again later"
        )
        retry_s = NO_REPLICA_RETRY_S
    elif why == ContinuationOutcome.LIMIT:
        message = "one replica after the other failed while it generated the answer; try again"
    headers = {"retry-after": str(retry_s)}
    return HTTPError(503, message, kind="service_unavailable", code="decode_failed", headers=headers)


def internal_error(request_id: str) -> HTTPError:
    """500; the details are in the log under the request id."""
    message = f"the server failed to answer; its log has the details under request id {request_id}"
    return HTTPError(500, message, kind="server_error", code="internal_error")


def no_route(status: int, detail: str, headers: Mapping[str, str] | None = None) -> HTTPError:
    """404 or 405 for a path or method that the API does not have; `headers` say which methods it has."""
    if status == 404:  # noqa: PLR2004 - HTTP status
        detail = _NO_PATH
    return HTTPError(status, detail, kind="invalid_request_error", code="no_such_route", headers=headers)


_NO_PATH: Final = (
    "there is no such path; there are /v1/chat/completions, /v1/responses, /v1/messages, "
    "/v1/messages/count_tokens, /v1/completions, /v1/models, /tokenize, /detokenize, /health and /ready, and "
    "metrics are Ray's, on a port of each node's own (docs/metrics.md)"
)


def _refusal(status: int, message: str, *, code: str, param: str | None = None) -> HTTPError:
    return HTTPError(
        status, message, kind="invalid_request_error", param=param, code=code, outcome=Outcome.REJECTED
    )


def _for_now(status: int, message: str, code: str, outcome: Outcome) -> HTTPError:
    """What may be sent again in a second."""
    kind = "service_unavailable" if status == 503 else "rate_limit_error"  # noqa: PLR2004
    return HTTPError(status, message, kind=kind, code=code, headers={"retry-after": "1"}, outcome=outcome)
