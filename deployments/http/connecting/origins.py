"""Web pages: whose may read answers.

Owns what answers say of it to browsers, which hold to it (CORS).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.middleware.cors import CORSMiddleware

from deployments.config.limits import LimitsConfig
from slo.request import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_TOLD: Final = (
    REQUEST_ID_HEADER,
    "retry-after",
    "x-slackserve-id",
    "x-slo-degraded",
    "x-slo-predicted-ttft-ms",
    "x-slo-prefilled-by",
    "x-slo-tier",
    "x-slo-tier-clamped-from",
    "x-slo-ttft-budget-ms",
)
"""Headers of an answer that a web page may read."""


def readable_by_pages(app: ASGIApp, limits: LimitsConfig) -> ASGIApp:
    """The application, or a single answer, that web pages of the allowed origins may read."""
    if not limits.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=limits.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=_TOLD,
    )
