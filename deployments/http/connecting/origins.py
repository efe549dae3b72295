"""Web pages: whose may have answers computed, and read them.

Owns what answers say of it to browsers (CORS). Browsers hold to that, but keep no page from posting what it
need not read the answer of: such a request is refused by its `Origin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.middleware.cors import CORSMiddleware

from deployments.config.limits import LimitsConfig
from slo.request import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp

_TOLD: Final = (
    REQUEST_ID_HEADER,
    "retry-after",
    "x-should-retry",
    "x-slackserve-id",
    "x-slo-degraded",
    "x-slo-predicted-ttft-ms",
    "x-slo-prefilled-by",
    "x-slo-tier",
    "x-slo-tier-clamped-from",
    "x-slo-ttft-budget-ms",
)
"""Headers of an answer that a web page may read."""
_ALL: Final = "*"
_OWN_PORTS: Final = {"http": ":80", "https": ":443"}
"""What browsers leave out of an origin, and a `Host` may have."""


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


def other_origin(headers: Mapping[str, str], limits: LimitsConfig) -> str | None:
    """The origin that these headers of a request name, if its pages may not ask.

    A page may that is allowed, or whose host is the request's: another service may be behind the same name.
    """
    origin = headers.get("origin")
    if origin is None or _ALL in limits.allowed_origins or origin in limits.allowed_origins:
        return None
    scheme, _, authority = origin.lower().partition("://")
    own = headers.get("host", "").lower().removesuffix(_OWN_PORTS.get(scheme, ""))
    return None if authority and authority == own else origin
