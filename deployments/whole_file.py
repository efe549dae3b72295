"""Writes a file as a whole, so that a disk that is full does not cost what was there before."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Where writing over a file would cost what is there, too. What else fails is the replacing: of a file that
is mounted alone or another user's, or where a file system knows no renaming or no owners."""


def write_whole(path: Path, text: str) -> None:
    """Put this text into a file; where there is no room for it, or a disk fails, what was there stays.

    What no other file can take the place of, as that of a device or one without a name, is written over.

    Raises:
        OSError: when it cannot be written.
    """
    place = path.resolve()  # a link stays one
    is_special = path.exists() and not (place.is_file() and place.samefile(path))
    may_add = os.access(place.parent, os.W_OK | os.X_OK)
    if is_special or not may_add or not _is_replaced(place, text):
        path.write_text(text, encoding="utf-8")


def _is_replaced(place: Path, text: str) -> bool:
    """Whether a file with this text has taken the place; false where none can be beside it, or take it."""
    beside = place.with_name(f".slackserve-{secrets.token_hex(8)}")
    try:
        file = beside.open("x", encoding="utf-8")
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        return False
    try:
        with file:
            file.write(text)
        try:
            if place.exists():
                there = place.stat()
                os.chown(beside, there.st_uid, there.st_gid)
                shutil.copymode(place, beside)
            beside.replace(place)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            return False
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return True
