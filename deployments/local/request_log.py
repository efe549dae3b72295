"""One request's timeline, from the logs of the processes on this machine.

Owns how the log lines of a request are found and read, as text and as JSON; what they say is their writers'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from slo.request import JobId, job_of
from telemetry.logs import fields_of

if TYPE_CHECKING:
    from rich.console import Console

SESSION_LOGS: Final = Path("/tmp/ray/session_latest/logs")  # noqa: S108 - where Ray keeps them unless told otherwise
_TEXT: Final = re.compile(
    r"[A-Z]+ (?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) "
    r"(?P<deployment>\S+) (?P<replica>\S+) .*?-- (?P<event>[a-z_]+) (?P<fields>.*=.*)"
)
_PATTERNS: Final = ("*.err", "*.log", "*.err.[0-9]*", "*.log.[0-9]*")
"""What processes write, and what was theirs until it was full."""
_EVERYWHERE: Final = frozenset({"request_id", "job_id", "jobs"})
"""Fields that say which request it is, which is known."""
_IDS: Final = _EVERYWHERE | {"server_id", "x_request_id", "beneficiary"}
_SERVER_ID: Final = "[0-9a-f]{16}"
"""What the server calls a request; behind the client's name of it, the name of its job."""

_ANY_COLUMNS: Final = 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class LogEvent:
    """Something that a process has logged of a request; `fields` as they stand there."""

    at: datetime
    where: str
    event: str
    fields: str


def events_of(request_id: str, directory: Path) -> list[LogEvent]:
    """What all processes have logged of a request, in the order of time.

    A request whose body has named it is found by the `x-request-id` of its answer, too.
    """
    found = _found(request_id, directory)
    for event in [each for each in found if each.event == "request_named"]:
        named = dict(fields_of(event.fields))
        if named["x_request_id"] == request_id:
            found |= _found(named["server_id"], directory)
    return sorted(found)


def _found(request_id: str, directory: Path) -> set[LogEvent]:
    """The events with this id of a request; Ray has some lines in two files."""
    lines = (line for path in _files(directory) for line in _lines(path) if request_id in line)
    return {event for line in lines if (event := _parsed(line)) and _is_of(request_id, event)}


def print_timeline(console: Console, events: Iterable[LogEvent]) -> None:
    """Print the events, one a line where no terminal folds them: what reads them looks for whole words."""
    shown = timeline(events)
    if not console.is_terminal:
        shown.width = console.measure(shown, options=console.options.update(max_width=_ANY_COLUMNS)).maximum
    console.print(shown, crop=False, soft_wrap=True)


def timeline(events: Iterable[LogEvent]) -> Table:
    """The events with the seconds since the first of them."""
    table = Table(box=None, pad_edge=False)
    for heading in ("seconds", "process", "event", "what"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left", overflow="fold")
    first: datetime | None = None
    for event in events:
        first = first or event.at
        said = [f"{name}={value}" for name, value in fields_of(event.fields) if name not in _EVERYWHERE]
        table.add_row(
            f"{(event.at - first).total_seconds():.3f}", event.where, event.event, Text(" ".join(said))
        )
    return table


def _files(directory: Path) -> Iterator[Path]:
    yield from (path for pattern in _PATTERNS for path in sorted(directory.rglob(pattern)))


def _lines(path: Path) -> Iterator[str]:
    with path.open(errors="replace") as file:
        yield from file


def _parsed(line: str) -> LogEvent | None:
    if line.startswith("{"):
        try:
            values = json.loads(line)
            line = (
                f"INFO {values['asctime']} {values['deployment']} {values['replica']} -- {values['message']}"
            )
        except (ValueError, KeyError):
            return None
    if (found := _TEXT.match(line)) is None:
        return None
    where = f"{found['deployment'].removeprefix('slackserve_')} {found['replica']}"
    at = datetime.strptime(found["at"], "%Y-%m-%d %H:%M:%S,%f")  # noqa: DTZ007 - one machine's, compared only
    return LogEvent(at, where, found["event"], found["fields"].rstrip())


def _is_of(request_id: str, event: LogEvent) -> bool:
    """Whether it is about the request itself, or an attempt at it, by the client's id or the server's."""
    ids = rf"{re.escape(request_id)}(-{_SERVER_ID})?"
    if re.fullmatch(_SERVER_ID, request_id):
        ids = rf"{ids}|.+-{request_id}"
    return any(
        re.fullmatch(ids, job_of(JobId(each)))
        for name, value in fields_of(event.fields)
        if name in _IDS
        for each in value.strip('"').split(",")
    )
