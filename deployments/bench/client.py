"""One streaming completion of an OpenAI-compatible server over HTTP, timed.

Owns what `slackserve bench` sends and reads. The client of `vllm bench serve`
(`vllm.benchmarks.lib.endpoint_request_func`) is not used because of a request that fails it keeps neither the
status nor the error's code, so that 429 and 503 cannot be told apart, and an error in the middle of a stream
counts as success; it also takes all of vLLM to import, which a client's machine need not have. The `openai`
package tells errors apart, but takes ten times as long for each chunk, time that a client on the server's
machine takes from the server.
"""

from __future__ import annotations

import errno
import resource
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from deployments.bench import BenchError
from deployments.bench.answer import Answer, Fate
from deployments.client import Connection, connection, error_code, error_message

_OK: Final = 200
_REFUSALS: Final = frozenset({429, 503})
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_MOST_CHARACTERS: Final = 80
"""Of what a server says, in the name of a failure."""


class Server:
    """A server that is connected to."""

    def __init__(self, at: Connection) -> None:
        self._at = at

    async def models(self) -> list[str] | None:
        """The names of the models that it serves; None when it has no such list.

        Raises:
            BenchError: when it cannot be reached, or wants another key.
        """
        return await self._at.models()

    async def complete(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a streaming completion and read it to its end. Never raises for what the server does.

        Raises:
            BenchError: when this process can open no further connection.
        """
        stream = _Stream(time.perf_counter())
        try:
            async with self._at.session.post(
                f"{self._at.url}/completions",
                data=body,
                headers={"Content-Type": "application/json", **headers},
            ) as response:
                if response.status != _OK:
                    return stream.refused(response.status, await response.read())
                async for line in response.content:
                    stream.read(line)
        except TimeoutError:
            return stream.failed("timeout")
        except (aiohttp.ClientError, OSError) as error:
            if getattr(error, "errno", None) in _OUT_OF_DESCRIPTORS:
                raise _too_many_open() from None
            return stream.failed(type(error).__name__)
        except ValueError:  # a line that is no event, or longer than any
            return stream.failed("not an event stream")
        return stream.ended()


@asynccontextmanager
async def connected(
    url: str, api_key: str | None, timeout_s: float, cacert: Path | None = None
) -> AsyncIterator[Server]:
    """Connect to the server at `url`, given with or without `/v1`; requests longer than `timeout_s` fail.

    Raises:
        BenchError: when an option is of no use; the message names it.
    """
    async with connection(url, api_key, timeout_s, BenchError, cacert) as at:
        yield Server(at)


def _too_many_open() -> BenchError:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BenchError(
        f"this client has too many requests open for its {limit:,} file descriptors; give a lower rate or a "
        "shorter --timeout, or raise the hard limit (`ulimit -Hn`)"
    )


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    """What counts of an event; vLLM has put an error where others put the object's type."""

    object: Any = None
    error: Any = None
    choices: list[Any] | None = None
    usage: _Usage | None = None


class _Stream:
    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._last_s = sent_s
        self._chunks = 0
        self._counted: int | None = None
        self._error = ""
        self._said = ""
        self._is_done = False

    def read(self, line: bytes) -> None:
        """Take a line of the event stream.

        Raises:
            ValueError: when it has an event that is none of a completion.
        """
        if not line.startswith(b"data:"):
            return
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self._is_done = True
            return
        event = msgspec.json.decode(payload, type=_Event)
        if event.error or event.object == "error":
            whole = msgspec.json.decode(payload)
            self._error, self._said = _name(whole), error_message(whole)
        if event.choices:
            self._last_s = time.perf_counter()
            self._chunks += 1
            if self._first_s is None:
                self._first_s = self._last_s
        if event.usage is not None:
            self._counted = event.usage.completion_tokens

    def ended(self) -> Answer:
        """The stream ended as HTTP sees it; it may still not have been a whole answer."""
        if self._error:
            return self.failed(f"in the stream: {self._error}")
        if self._first_s is None:
            return self.failed("no token")
        if not self._is_done:
            return self.failed("cut off")
        return self._answer(Fate.ANSWERED)

    def failed(self, reason: str) -> Answer:
        """It failed, perhaps after some tokens."""
        return self._answer(Fate.FAILED, reason)

    def refused(self, status: int, body: bytes) -> Answer:
        """The server answered with an error."""
        try:
            whole = msgspec.json.decode(body)
            code, self._said = error_code(whole), error_message(whole)
        except msgspec.DecodeError:
            code = ""
        fate = Fate.REFUSED if status in _REFUSALS else Fate.FAILED
        return self._answer(fate, f"{status} {code}".strip())

    def _answer(self, fate: Fate, reason: str = "") -> Answer:
        tokens = self._chunks if self._counted is None else self._counted
        ttft_s = tpot_s = None
        if self._first_s is not None:
            ttft_s = self._first_s - self._sent_s
            tpot_s = (self._last_s - self._first_s) / (tokens - 1) if tokens > 1 else None
        return Answer(fate, self._sent_s, time.perf_counter(), reason, ttft_s, tpot_s, tokens, self._said)


def _name(event: dict[str, Any]) -> str:
    """What an error in a stream is called: as `error_code` has it, else its status, else what it says."""
    error = event.get("error") or event
    if isinstance(error, dict):
        error = error_code(error) or error.get("code") or error.get("message") or "error"
    return str(error)[:_MOST_CHARACTERS]
