"""The server's side of ZeroMQ's protocol (ZMTP 3.0 without security), as far as questions need it.

A socket of ZeroMQ's takes in frames of a message until the last has come, however many: whoever reaches it
could fill the memory of its process. Owns how one connection is read and written, with a bound; what is asked
is `side_channel`'s.
"""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter
from typing import Final

MAX_BYTES: Final = 4096
"""A handshake's question has thirty bytes, one about leases a hundred for each; who sends more is cut off."""
_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_GREETING: Final = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY" + b"\x0bSocket-Type" + b"\x00\x00\x00\x06" + b"ROUTER"


class NoQuestionError(Exception):
    """What arrives is not ZeroMQ's, or no question of one frame behind an empty one."""


async def greet(reader: StreamReader, writer: StreamWriter) -> None:
    """Begin as ZeroMQ does.

    Raises:
        NoQuestionError: The other side does not.
        asyncio.IncompleteReadError: It leaves.
    """
    writer.write(_GREETING + _frame(_READY, _COMMAND))
    greeting = await reader.readexactly(len(_GREETING))
    if greeting[0] != _SIGNATURE[0] or greeting[9] != _SIGNATURE[9] or greeting[10] < 3:  # noqa: PLR2004
        raise NoQuestionError
    await _read(reader, _COMMAND)


async def question(reader: StreamReader) -> bytes:
    """The next question.

    Raises:
        NoQuestionError: It is none, or has more than `MAX_BYTES`.
        asyncio.IncompleteReadError: The other side leaves.
    """
    await _read(reader, _MORE)
    return await _read(reader, 0)


def answer(*frames: bytes) -> bytes:
    """The bytes of an answer of several frames."""
    *first, last = [b"", *frames]
    return b"".join([_frame(frame, _MORE) for frame in first] + [_frame(last, 0)])


async def _read(reader: StreamReader, kind: int) -> bytes:
    flags, size = await reader.readexactly(2)
    if flags & _LONG:
        size = int.from_bytes(bytes([size]) + await reader.readexactly(7))
    if flags & ~_LONG != kind or size > MAX_BYTES:
        raise NoQuestionError
    return await reader.readexactly(size)


def _frame(content: bytes, kind: int) -> bytes:
    return bytes([kind | _LONG]) + len(content).to_bytes(8) + content
