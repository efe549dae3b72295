"""Structured logs: one line per event of a request, the same fields in every process.

Lines go through Ray Serve's logger, which adds time, replica and deployment and writes JSON when the
deployment is configured so; the event's own fields are `key=value` text and JSON fields alike.
"""

from __future__ import annotations

import logging
from typing import Any, Final

_LOGGER: Final = logging.getLogger("ray.serve")


def event(name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log what happened to a request.

    Args:
        name: The event, past tense, for example "request_placed".
        level: A `logging` level.
        fields: What to say about it; `request_id` and `job_id` belong in every line about a request.
    """
    if not _LOGGER.isEnabledFor(level):
        return
    text = " ".join(f"{key}={_shown(value)}" for key, value in fields.items() if value is not None)
    _LOGGER.log(level, "%s %s", name, text, extra={"ray_serve_extra_fields": {"event": name, **fields}})


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
