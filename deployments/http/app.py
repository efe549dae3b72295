"""The FastAPI application around the ingress: its routes, and the gatekeeper in front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray.serve.llm.ingress import make_fastapi_ingress
from starlette.exceptions import HTTPException

from deployments.http.errors import HTTPError
from deployments.http.gatekeeper import Gatekeeper, answer_refusal
from deployments.http.ingress import SlackServeIngress
from slo.errors import FieldError

if TYPE_CHECKING:
    from slo.admission.tenants import KeyRing


def make_ingress(keys: KeyRing, max_body_bytes: int) -> type:
    """The ingress class with its routes, ready to be deployed.

    Args:
        keys: Known API keys.
        max_body_bytes: Largest request body.
    """
    app = FastAPI(title="SlackServe", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPError, answer_refusal)
    app.add_exception_handler(FieldError, answer_refusal)
    app.add_exception_handler(HTTPException, answer_refusal)
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
