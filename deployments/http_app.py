"""The FastAPI application around the ingress: routes, error answers, the gatekeeper in front."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from ray.exceptions import TaskCancelledError
from ray.serve.llm.ingress import make_fastapi_ingress
from starlette.exceptions import HTTPException

from deployments import http_errors
from deployments.http_errors import HTTPError
from deployments.ingress import SlackServeIngress
from deployments.middleware import Gatekeeper
from slo.errors import FieldError
from telemetry import logs

if TYPE_CHECKING:
    from starlette.responses import Response

    from slo.tenancy import KeyRing


def make_ingress(keys: KeyRing, max_body_bytes: int) -> type:
    """The ingress class with its routes, ready to be deployed.

    Args:
        keys: Known API keys.
        max_body_bytes: Largest request body.
    """
    app = FastAPI(title="SlackServe", docs_url=None, redoc_url=None)
    for error_type in (HTTPError, FieldError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(error_type, _answer)
    app.add_middleware(Gatekeeper, keys=keys, max_body_bytes=max_body_bytes)
    routes: dict[str, Any] = {
        "models": lambda api: api.get("/v1/models"),
        "model_data": lambda api: api.get("/v1/models/{model:path}"),
        "completions": lambda api: api.post("/v1/completions"),
        "chat": lambda api: api.post("/v1/chat/completions"),
        "health": lambda api: api.get("/health"),
        "ready": lambda api: api.get("/ready"),
    }
    return make_fastapi_ingress(SlackServeIngress, endpoint_map=routes, app=app)  # type: ignore[no-any-return]


async def _answer(request: Request, error: Exception) -> Response:
    """Turn any exception of a route into an error answer, and leave word for the gatekeeper."""
    answer = _http_error(request, error)
    request.state.refusal = answer
    return answer.response()


def _http_error(request: Request, error: Exception) -> HTTPError:
    match error:
        case HTTPError():
            return error
        case FieldError():
            return http_errors.bad_field(error)
        case RequestValidationError():
            return http_errors.bad_body(error)
        case HTTPException():
            return http_errors.no_route(error.status_code, str(error.detail))
        case TaskCancelledError():
            return http_errors.client_gone()
    request_id = str(request.state.request_id)
    logs.event("route_failed", level=logging.ERROR, request_id=request_id, error=repr(error)[:2000])
    return http_errors.internal_error(request_id)
