"""The HTTP API's application: which method of the ingress answers which path, and what stands before them.

Owns the paths, the gate before all of them, and when the door is open. What a path answers is
`deployments.http.ingress`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from fastapi import FastAPI
from ray import serve
from ray.serve.llm.ingress import make_fastapi_ingress
from starlette.exceptions import HTTPException

from deployments.config.limits import LimitsConfig
from deployments.http import door
from deployments.http.connecting.origins import readable_by_pages
from deployments.http.errors import MESSAGES_PATH, HTTPError
from deployments.http.gatekeeper import Gatekeeper, answer_refusal
from deployments.http.ingress import SlackServeIngress
from deployments.http.key_watch import KeyWatch
from slo.errors import FieldError

_LOOK_S: Final = 0.01


def make_ingress(ingress: type[SlackServeIngress], keys: KeyWatch, limits: LimitsConfig) -> type:
    """The ingress class with its routes, ready to be deployed.

    Args:
        ingress: The class that has the routes' methods.
        keys: Known API keys.
        limits: What a client may send.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await keys.first_read()
        async with door.opened(app, limits, _in_place), _announced():
            yield

    # A redirect would name the scheme here: behind a proxy with TLS a client would send its body in clear.
    app = FastAPI(
        title="SlackServe",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.add_exception_handler(HTTPError, answer_refusal)
    app.add_exception_handler(FieldError, answer_refusal)
    app.add_exception_handler(HTTPException, answer_refusal)
    app.add_middleware(Gatekeeper, keys=keys, limits=limits)
    # Before the gate: a browser asks without a key whether it may ask.
    app.add_middleware(readable_by_pages, limits=limits)
    reads = ["GET", "HEAD"]
    routes: dict[str, Any] = {
        "models": lambda api: api.api_route("/v1/models", methods=reads),
        "model_data": lambda api: api.api_route("/v1/models/{model:path}", methods=reads),
        "completions": lambda api: api.post("/v1/completions"),
        "chat": lambda api: api.post("/v1/chat/completions"),
        "responses": lambda api: api.post("/v1/responses"),
        "messages": lambda api: api.post(MESSAGES_PATH),
        "count_tokens": lambda api: api.post(f"{MESSAGES_PATH}/count_tokens"),
        "tokenize": lambda api: api.post("/tokenize"),
        "detokenize": lambda api: api.post("/detokenize"),
        "health": lambda api: api.api_route("/health", methods=reads),
        "ready": lambda api: api.api_route("/ready", methods=reads),
    }
    return make_fastapi_ingress(ingress, endpoint_map=routes, app=app)  # type: ignore[no-any-return]


@asynccontextmanager
async def _announced() -> AsyncIterator[None]:
    """Meanwhile the monitor is told of the ingress, once requests find it.

    One whose start does not end, for want of its keys, serves nobody and counts for none.
    """

    async def announce() -> None:
        (await _in_place()).announce()

    announcing = asyncio.create_task(announce(), name="announce")
    try:
        yield
    finally:
        announcing.cancel()


async def _in_place() -> SlackServeIngress:
    """The ingress, once requests find it: Serve names it to them when its start is over."""
    while (ingress := serve.get_replica_context().servable_object) is None:  # noqa: ASYNC110 - Serve has no event for it
        await asyncio.sleep(_LOOK_S)
    return cast("SlackServeIngress", ingress)
