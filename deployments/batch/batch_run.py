"""Asks a server for the answers to a batch, until each request has one or has failed, or time is up."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final

import aiohttp
import msgspec

from deployments.batch import BatchError
from deployments.batch.pace import BatchPace
from deployments.batch.requests import BatchRequest
from deployments.batch.results import BatchFailure, BatchResponse, ResultFiles
from deployments.batch.verdict import Verdict, judge, retry_after_s
from deployments.batch.view import BatchView
from deployments.client import Connection, error_code, error_message

TRIES: Final = 5
"""How often a request is sent that fails: one that ends engines must not do so until time is up."""
_JSON: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class _Reply:
    """How an attempt ended.

    Attributes:
        reason: What the server said, or what happened; what is kept.
        name: Of the reason, for a table.
        wait_s: How long the server asks not to be asked.
    """

    verdict: Verdict
    reason: BatchResponse | BatchFailure
    name: str
    wait_s: float | None = None


class BatchRun:
    """Sends requests and keeps what comes of them.

    Args:
        server: Whom.
        headers: Of each request.
        file: Has the requests.
        results: Where answers are kept.
        pace: How many at a time.
        view: Is told of each reply.
    """

    def __init__(
        self,
        server: Connection,
        headers: Mapping[str, str],
        file: BinaryIO,
        results: ResultFiles,
        pace: BatchPace,
        view: BatchView,
    ) -> None:
        self._server = server
        self._headers = {**_JSON, **headers}
        self._file = file
        self._results = results
        self._pace = pace
        self._view = view
        self._waiting: deque[BatchRequest] = deque()
        self._running: dict[asyncio.Task[_Reply], tuple[BatchRequest, float]] = {}
        self._failures: dict[str, int] = {}

    async def ask(self, requests: Sequence[BatchRequest], until_s: float) -> None:
        """Ask for all, until `until_s` of `time.monotonic`; what has no answer by then has failed.

        Raises:
            BatchError: when no request can be answered as things are, or nothing can be kept.
        """
        self._waiting.extend(requests)
        try:
            while self._waiting or self._running:
                now_s = time.monotonic()
                if now_s >= until_s:
                    break
                wait_s = until_s - now_s
                if self._waiting and len(self._running) < self._pace.room:
                    if now_s >= self._pace.next_s:
                        self._send(self._waiting.popleft(), now_s)
                        continue
                    wait_s = min(wait_s, self._pace.next_s - now_s)
                await self._reply(wait_s)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        late = BatchFailure("batch_expired", "there was no time left for it")
        for request in (*(request for request, _ in self._running.values()), *self._waiting):
            self._fail(request, late, late.code)

    def _send(self, request: BatchRequest, now_s: float) -> None:
        body = request.body(self._file)
        self._running[asyncio.create_task(self._attempt(request, body))] = request, now_s

    async def _reply(self, wait_s: float) -> None:
        """Wait for replies, no longer than that, and act on them."""
        if not self._running:
            await asyncio.sleep(wait_s)
            return
        done, _ = await asyncio.wait(self._running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            request, sent_s = self._running.pop(task)
            self._act(request, sent_s, task.result())

    def _act(self, request: BatchRequest, sent_s: float, reply: _Reply) -> None:
        now_s = time.monotonic()
        match reply.verdict:
            case Verdict.ANSWERED:
                assert isinstance(reply.reason, BatchResponse)
                self._results.answer(request, reply.reason)
                self._pace.answered()
                self._view.answer()
            case Verdict.WRONG:
                self._fail(request, reply.reason, reply.name)
            case Verdict.REFUSED:
                self._pace.refused(now_s, sent_s, reply.wait_s)
                self._view.refuse(reply.name)
                self._waiting.append(request)  # behind those that may be taken
            case Verdict.FAILED:
                self._pace.refused(now_s, sent_s, reply.wait_s)
                self._view.refuse(reply.name)
                self._failures[request.custom_id] = failures = self._failures.get(request.custom_id, 0) + 1
                if failures == TRIES:
                    self._fail(request, reply.reason, reply.name)
                else:
                    self._waiting.append(request)
            case Verdict.OF_THE_RUN:
                raise BatchError(f"{self._server.url} answers {reply.name}: {_said(reply.reason)}")

    def _fail(self, request: BatchRequest, reason: BatchResponse | BatchFailure, name: str) -> None:
        self._results.fail(request, reason)
        self._view.fail(name)

    async def _attempt(self, request: BatchRequest, body: bytes) -> _Reply:
        try:
            async with self._server.session.post(
                self._server.url + request.path, data=body, headers=self._headers
            ) as response:
                read = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            failure = BatchFailure("not_connected", str(error))
            return _Reply(Verdict.REFUSED, failure, failure.code)
        except TimeoutError:
            failure = BatchFailure("timeout", "there was no answer in time; see --timeout")
            return _Reply(Verdict.FAILED, failure, failure.code)
        except (aiohttp.ClientError, OSError) as error:
            failure = BatchFailure("connection_lost", f"{type(error).__name__}: {error}")
            return _Reply(Verdict.FAILED, failure, failure.code)
        try:
            said: Any = msgspec.json.decode(read)
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = None
        text = read[:300].decode(errors="replace")
        verdict = judge(response.status, response.headers, said, text=text, names_tier=request.names_tier)
        name = f"{response.status} {error_code(said)}".strip()
        wait_s = retry_after_s(response.headers, datetime.now(UTC))
        if said is None:
            return _Reply(verdict, BatchFailure("no_json", f"{response.status}: {text}"), name, wait_s)
        # In one line, as the file has it, also where a server breaks its JSON.
        body = msgspec.json.format(read, indent=-1) if b"\n" in read else read
        kept = BatchResponse(response.status, response.headers.get("x-request-id", ""), msgspec.Raw(body))
        return _Reply(verdict, kept, name, wait_s)


def _said(reason: BatchResponse | BatchFailure) -> str:
    if isinstance(reason, BatchFailure):
        return reason.message
    return error_message(msgspec.json.decode(reason.body))
