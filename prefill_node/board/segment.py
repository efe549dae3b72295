"""The file behind a board: made, found, checked, removed. What stands in it is `prefill_node.board.board`'s.

A segment is a file in /dev/shm, mapped by every process of a prefill replica. Its creator holds an exclusive
flock on it for as long as it lives, and the kernel takes that lock away with the process, however it ends. A
file whose lock can be taken was therefore left by a crash; whoever makes the next board removes it. (A
process forked from the creator shares the lock: the board is stale only when both are gone.)

`multiprocessing.shared_memory` is not used: up to Python 3.12 its resource tracker counts an attaching
process as an owner, so the first worker that ends unlinks the segment under all others.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Self

from prefill_node.board.layout import HEADER_BYTES, MAGIC, VERSION, WORD, segment_bytes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory, not a place for temporary files
NAME_PREFIX = "slackserve-board-"


class BoardUnavailableError(RuntimeError):
    """A board cannot be made or joined; `where` is its file, or the directory meant for it."""

    def __init__(self, where: Path, what: str, remedy: str) -> None:
        super().__init__(f"board {where}: {what}; {remedy}")


class Segment:
    """A mapped board file.

    Attributes:
        path: The file; it may be gone already.
        ranks: How many ranks it has room for.
        data: All of it as bytes.
        words: All of it as native 64-bit words.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, lock: int | None) -> None:
        self.path = path
        self._mapping = mapping
        self._lock = lock
        self.data = memoryview(mapping)
        self.words = self.data.cast("Q")
        self.ranks = self.words[2]

    @classmethod
    def create(cls, ranks: int, directory: Path) -> Self:
        """Make a segment and keep its lock.

        Raises:
            BoardUnavailableError: The directory is missing, not ours to write or full.
        """
        size = segment_bytes(ranks)
        try:
            path, lock = _new_file(directory)
            try:
                # All pages now: one that a full /dev/shm cannot give later kills the process with SIGBUS.
                os.posix_fallocate(lock, 0, size)
                mapping = mmap.mmap(lock, size)
            except OSError:
                path.unlink(missing_ok=True)
                os.close(lock)
                raise
        except OSError as error:
            remedy = f"it needs {size} bytes of shared memory there: make room or give the container more"
            raise BoardUnavailableError(directory, f"no new one can be made ({error})", remedy) from error
        header = memoryview(mapping).cast("Q")
        header[1], header[2], header[3] = VERSION, ranks, size
        header[0] = MAGIC
        header.release()
        return cls(path, mapping, lock)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Map a segment that another process has made.

        Raises:
            BoardUnavailableError: It is missing, or no board of this version.
        """
        restart = "restart the replica, so that all its processes run the same version"
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            remedy = (
                "its replica has ended, or the name was removed before all had attached: restart the replica"
            )
            raise BoardUnavailableError(path, f"cannot be opened ({error.strerror})", remedy) from error
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES:
                raise BoardUnavailableError(path, f"is no board ({size} bytes)", restart)
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        if problem := _foreign(mapping, size):
            mapping.close()
            raise BoardUnavailableError(path, problem, restart)
        return cls(path, mapping, None)

    def unlink(self) -> None:
        """Remove the name; the memory lives on for those who map it. Repeating is harmless."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap; the creator also removes the name and gives the lock back. Repeating is harmless."""
        self.words.release()
        self.data.release()
        self._mapping.close()
        if self._lock is not None:
            self.unlink()
            os.close(self._lock)
            self._lock = None


def remove_stale_boards(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the boards whose creators are gone, and return their files."""
    removed = []
    for path in sorted(directory.glob(f"{NAME_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # somebody else has just removed it, or it is another user's
            continue
        with contextlib.suppress(OSError):  # locked: its creator lives; or another user's name, which stays
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        os.close(fd)
    return removed


def _new_file(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{NAME_PREFIX}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # somebody took it for stale in the moment before it was locked


def _foreign(mapping: mmap.mmap, size: int) -> str | None:
    magic, version, ranks, stated = (
        int.from_bytes(mapping[at : at + WORD], "little") for at in range(0, 4 * WORD, WORD)
    )
    if magic != MAGIC:
        return "is no board"
    if version != VERSION:
        return f"has layout {version}, this process expects {VERSION}"
    if not size == stated == segment_bytes(ranks):
        return f"has {size} bytes, for {ranks} ranks it should have {segment_bytes(ranks)}"
    return None
