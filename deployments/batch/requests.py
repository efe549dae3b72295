"""The requests of a batch: lines of a file, of the shape that OpenAI's Batch API and `vllm run-batch` take.

    {"custom_id": "summary-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …}}

All lines are checked before the first one is sent. Of each, only its name and its place are kept: a file
may be larger than memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from deployments.batch import BatchError

_PREFIX: Final = "/v1/"
_LEFT_OPEN: Final = frozenset({b"null", b'"auto"'})
"""Values of `service_tier` that leave the choice to the server, and so contradict no header."""


class _Body(msgspec.Struct):
    """What counts of a body before it is sent."""

    model: str | None = None
    stream: bool | None = None
    service_tier: msgspec.Raw = msgspec.Raw(b"null")


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request, and where it stands in its file.

    Attributes:
        custom_id: Its name, which no other one of the file has.
        path: Of the API, below `/v1`, such as `/chat/completions`.
        digest: Of its line; another line has another one.
        offset: Of its line, bytes.
        length: Of its line, bytes.
        names_tier: Whether its body has a tier of its own, which can contradict the batch's.
    """

    custom_id: str
    path: str
    digest: str
    offset: int
    length: int
    names_tier: bool = False

    def body(self, file: BinaryIO) -> bytes:
        """What is sent, as it stands in `file`.

        Raises:
            BatchError: when the file has something else there by now.
        """
        file.seek(self.offset)
        line = file.read(self.length)
        if _digest(line) != self.digest:
            raise BatchError(
                f"{file.name} has changed while it was read; what is answered is kept: give the command again"
            )
        return bytes(msgspec.json.decode(line, type=_Line).body)


def read_requests(file: BinaryIO, models: Collection[str] | None) -> list[BatchRequest]:
    """Check all requests of a file; empty lines are none.

    Args:
        file: Open for reading, one that can be sought in.
        models: What the server has; None where it does not say.

    Raises:
        BatchError: naming the first line that cannot be sent, and why; or that there is none.
    """
    found: list[BatchRequest] = []
    lines_of: dict[str, int] = {}
    for number, (offset, line) in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            given, body = _checked(line, models)
        except (ValueError, msgspec.MsgspecError) as error:
            raise BatchError(f"{file.name}, line {number}: {error}") from None
        if (before := lines_of.get(given.custom_id)) is not None:
            raise BatchError(
                f"{file.name}, line {number}: custom_id: {given.custom_id!r} is that of line {before}, too"
            )
        lines_of[given.custom_id] = number
        path = given.url.removeprefix("/v1")
        names_tier = bytes(body.service_tier) not in _LEFT_OPEN
        found.append(BatchRequest(given.custom_id, path, _digest(line), offset, len(line), names_tier))
    if not found:
        raise BatchError(f"{file.name} has no request; give one in each line")
    return found


def open_requests(path: Path) -> BinaryIO:
    """Open a file of requests.

    Raises:
        BatchError: when it cannot be read, or not from anywhere, as a pipe.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise BatchError(f"{path}: cannot be read ({error.strerror})") from None
    if not file.seekable():
        file.close()
        raise BatchError(f"{path}: is read twice, which a pipe cannot be; write it to a file")
    return file


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    offset = 0
    for line in file:
        yield offset, line
        offset += len(line)


def _checked(line: bytes, models: Collection[str] | None) -> tuple[_Line, _Body]:
    """A line whose body can be sent, and what counts of that.

    Raises:
        ValueError: when it cannot, with the field.
        msgspec.MsgspecError: when it has another shape.
    """
    given = msgspec.json.decode(line, type=_Line)
    if given.method != "POST":
        raise ValueError(f"method: {given.method!r} is not POST")
    if not given.url.startswith(_PREFIX) or given.url == _PREFIX:
        raise ValueError(f"url: {given.url!r} is no path of the API, such as /v1/chat/completions")
    body = msgspec.json.decode(given.body, type=_Body)
    if body.stream:
        raise ValueError("body.stream: an answer is written as a whole; leave it out")
    if models is not None and body.model is not None and body.model not in models:
        raise ValueError(
            f"body.model: {body.model!r} is not served there; it serves {', '.join(models) or 'none'}"
        )
    return given, body


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line.strip(), digest_size=12).hexdigest()
