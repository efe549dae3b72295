"""Structured logs: one line per event of a request, the same fields in every process.

Lines go through Ray Serve's logger, which adds time, replica and deployment and writes JSON when the
deployment is configured so; the event's own fields are `key=value` text and JSON fields alike. Owns how both
are written, and how the text is read again.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import Any, Final

_LOGGER: Final = logging.getLogger("ray.serve")
_FIELD: Final = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^" ]\S*)(?: |$)')

_SERVES: Final = frozenset(
    {"request_id", "route", "application", "deployment", "replica", "component_name", "component_id"}
    | {"worker_id", "node_id", "actor_id", "actor_name", "task_name", "task_func_name"}
)
"""JSON fields in which Serve writes who logs, and in which request, over what was given."""


def event(name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event, named in the past tense, as "request_placed"; None in `fields` is left out of the text.

    `request_id` and `job_id` belong in every line about a request. In JSON a field whose name Serve uses for
    itself, as `replica`, is there as `event_replica`, too.
    """
    if not _LOGGER.isEnabledFor(level):
        return
    text = " ".join(f"{key}={_shown(value)}" for key, value in fields.items() if value is not None)
    plain = {key: _plain(value) for key, value in fields.items()}
    about = {f"event_{key}": plain[key] for key in plain.keys() & _SERVES}
    _LOGGER.log(
        level, "%s %s", name, text, extra={"ray_serve_extra_fields": {"event": name, **plain, **about}}
    )


@contextmanager
def kept() -> Iterator[None]:
    """Keep Serve's log while libraries are imported that configure logging for themselves, as NIXL's does.

    `logging.config.dictConfig` closes all handlers of the process. Serve's would write no line any more, and
    the replica could not say where it logs: a Serve controller that was started again asks for that, and
    stops each replica that does not answer.
    """
    targets = [(each, each.target) for each in _LOGGER.handlers if isinstance(each, MemoryHandler)]
    try:
        yield
    finally:
        for handler, target in targets:
            handler.setTarget(target)


def fields_of(text: str) -> list[tuple[str, str]]:
    """The fields that stand in the text of an event, and their values as they stand there."""
    return _FIELD.findall(text)


def _plain(value: Any) -> Any:
    """A value as JSON has it: no number that is none, and text of what is neither a number nor a group."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case str() | int() | None:
            return value
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return str(value)


def _shown(value: Any) -> str:
    """A value on one line, in quotes unless it is one word.

    What a client has sent forges no line of its own, and no field.
    """
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_printable = text.isprintable()
    if is_printable and text and " " not in text and text[0] != '"':
        return text
    escaped = text.replace("\\", "\\\\") if is_printable else text.encode("unicode_escape").decode()
    return '"' + escaped.replace('"', '\\"') + '"'
