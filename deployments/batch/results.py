"""The results of a batch: a line for each request, of the shape that OpenAI's Batch API gives.

Answers are appended to one file while they come. A run goes on where the one before it ended: what has an
answer there is not asked again. The `id` of a result has the digest of its request's line, so that an answer
to something else is not taken for one. What has failed is in a file beside it, which each run writes anew.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, Self

import msgspec

from deployments.batch import BatchError
from deployments.batch.requests import BatchRequest

_ID: Final = "batch_req_"
_BEGINS: Final = f'{{"id":"{_ID}'.encode()
"""As each line of a result does."""


class BatchResponse(msgspec.Struct):
    """What a server answered.

    Attributes:
        body: JSON.
    """

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchFailure(msgspec.Struct):
    """Why there is no answer."""

    code: str
    message: str


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchFailure | None


class _Written(msgspec.Struct):
    """What counts of a line that is there."""

    id: str
    custom_id: str


class ResultFiles:
    """The two files that a run writes; a context manager that opens them for it alone.

    Args:
        path: Of answers.
        requests: The file that is neither of them.
    """

    def __init__(self, path: Path, requests: Path) -> None:
        self.path = path
        self._requests = requests
        self.failed_path = path.with_name(f"{path.stem}.failed{path.suffix}")
        self._answered = self._failed = -1

    def __enter__(self) -> Self:
        """Open them.

        Raises:
            BatchError: when one cannot be written, has the requests, or another process writes it.
        """
        for path in (self.path, self.failed_path):
            if path.exists() and path.samefile(self._requests):
                raise BatchError(f"{path}: has the requests; give another file for the answers")
        if self.path.exists() and not self.path.is_file():
            raise BatchError(f"{self.path}: is no file that can be gone on with; give another one")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._answered = _opened(self.path, flags)
        try:
            fcntl.flock(self._answered, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._answered)
            raise BatchError(f"{self.path}: another process writes its results there; wait for it") from None
        return self

    def __exit__(self, under_way: type[BaseException] | None, *_: object) -> None:
        """Write what the system still holds, and close them.

        Raises:
            BatchError: when it cannot be written, unless another error is under way.
        """
        with nullcontext() if under_way is None else suppress(BatchError):
            try:
                if self._failed >= 0:
                    _close(self._failed, self.failed_path)
            finally:
                _close(self._answered, self.path)

    def answered(self, requests: Mapping[str, BatchRequest]) -> set[str]:
        """Whose answers are there, by name. A line that a crash has cut is taken away.

        Raises:
            BatchError: when a line is no result of one of these requests; nothing is changed then. Also when
                a file cannot be changed.
        """
        if not _begins_as_result(self.failed_path):
            raise BatchError(
                f"{self.failed_path}: what fails is written there, and it is no result of a batch; give "
                "another file for the answers"
            )
        found: set[str] = set()
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    if not _is_part_of_result(line):
                        raise self._foreign(number)
                    break
                found.add(self._name(number, line, requests))
                whole += len(line)
        with _writing(self.path):
            os.ftruncate(self._answered, whole)
        with _writing(self.failed_path):
            self.failed_path.unlink(missing_ok=True)
        return found

    def _name(self, number: int, line: bytes, requests: Mapping[str, BatchRequest]) -> str:
        where = f"{self.path}, line {number}"
        try:
            written = msgspec.json.decode(line, type=_Written)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise self._foreign(number) from None
        request = requests.get(written.custom_id)
        if request is None:
            raise BatchError(
                f"{where}: there is no request {written.custom_id!r}; give another file"
            ) from None
        if written.id != _ID + request.digest:
            raise BatchError(
                f"{where}: answers another request than {written.custom_id!r} is now; give another file, or "
                "take the line away"
            )
        return written.custom_id

    def _foreign(self, number: int) -> BatchError:
        return BatchError(f"{self.path}, line {number}: is no result of a batch; give another file")

    def answer(self, request: BatchRequest, response: BatchResponse) -> None:
        """Keep an answer.

        Raises:
            BatchError: when it cannot be written.
        """
        _append(self._answered, self.path, _Result(_ID + request.digest, request.custom_id, response, None))

    def fail(self, request: BatchRequest, reason: BatchResponse | BatchFailure) -> None:
        """Keep why there is no answer: what the server said, or else what happened.

        Raises:
            BatchError: when it cannot be written.
        """
        if self._failed < 0:
            self._failed = _opened(self.failed_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        said = (reason, None) if isinstance(reason, BatchResponse) else (None, reason)
        _append(self._failed, self.failed_path, _Result(_ID + request.digest, request.custom_id, *said))


def _begins_as_result(path: Path) -> bool:
    """Whether a file has results, or is empty, or is not there."""
    try:
        with path.open("rb") as file:
            return _is_part_of_result(file.read(len(_BEGINS)))
    except FileNotFoundError:
        return True
    except OSError as error:
        raise BatchError(f"{path}: cannot be read ({error.strerror})") from None


def _is_part_of_result(line: bytes) -> bool:
    return line[: len(_BEGINS)] == _BEGINS[: len(line)]


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise BatchError(f"{path}: cannot be written ({error.strerror})") from None


def _append(descriptor: int, path: Path, result: _Result) -> None:
    left = memoryview(msgspec.json.encode(result) + b"\n")
    with _writing(path):
        while left:
            left = left[os.write(descriptor, left) :]


def _close(descriptor: int, path: Path) -> None:
    with _writing(path):
        try:
            os.fsync(descriptor)  # over a network the first to hear that there is no room
        finally:
            os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BatchError(
            f"{path}: cannot be written ({error.strerror}); what is there is kept: give the command again"
        ) from None
