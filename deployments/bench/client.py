"""One streaming completion of an OpenAI-compatible server over HTTP, timed.

Owns the HTTP side of `slackserve bench`: finding the model, sending a request, and reading its answer. It is
built on aiohttp, like the client of `vllm bench serve` (`vllm.benchmarks.lib.endpoint_request_func`). That
one is not used because of a request that fails it keeps neither the status nor the error's code, so that 429
and 503 cannot be told apart, and an error in the middle of a stream counts as success; it also takes all of
vLLM to import, which a client's machine need not have. The `openai` package tells errors apart, but takes ten
times as long for each chunk, time that a client on the server's machine takes from the server.
"""

from __future__ import annotations

import errno
import resource
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from deployments.bench import BenchError
from deployments.bench.answer import Answer, Fate

_OK: Final = 200
_REFUSALS: Final = frozenset({429, 503})
_KEEP_ALIVE_S: Final = 2.0
"""Less than servers wait before they close an idle connection, so that no request meets one being closed."""
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_MOST_CHARACTERS: Final = 80
"""Of what a server says, in the name of a failure."""
_LONGEST_MESSAGE: Final = 300


class Server:
    """A server that is connected to, whose API is at `url`, with `/v1`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def models(self) -> list[str] | None:
        """The names of the models that it serves; None when it has no such list.

        Raises:
            BenchError: when it cannot be reached, or wants another key.
        """
        try:
            async with self._session.get(f"{self._url}/models", timeout=_LOOK) as response:
                if response.status in {401, 403}:
                    raise BenchError(f"{self._url} refuses the API key ({response.status}); give --api-key")
                if response.status != _OK:
                    return None
                return [str(model["id"]) for model in (await response.json(content_type=None))["data"]]
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
            raise BenchError(
                f"{self._url}: this client does not trust the server's certificate ({why}); give "
                "--cacert FILE, with the certificate or that of who signed it"
            ) from None
        except aiohttp.ClientConnectorSSLError as error:
            raise BenchError(
                f"{self._url} does not speak TLS as this client does ({error.strerror}); is it http://?"
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise BenchError(f"{self._url} cannot be reached: {why}; is the server running?") from None
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"{self._url}/models does not answer as the OpenAI API does") from None

    async def complete(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a streaming completion and read it to its end. Never raises for what the server does.

        Raises:
            BenchError: when this process can open no further connection.
        """
        stream = _Stream(time.perf_counter())
        try:
            async with self._session.post(
                f"{self._url}/completions", data=body, headers={"Content-Type": "application/json", **headers}
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


_LOOK: Final = aiohttp.ClientTimeout(total=10)


@asynccontextmanager
async def connected(
    url: str, api_key: str | None, timeout_s: float, cacert: Path | None = None
) -> AsyncIterator[Server]:
    """Connect to the server at `url`, given with or without `/v1`; requests longer than `timeout_s` fail.

    With `cacert`, its certificates are trusted and no others. From then on this process may have as many
    connections as the system lets it.
    """
    base = _base(url)
    trust = True if cacert is None else _trusting(cacert, base)
    _raise_descriptor_limit()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=trust),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
    ) as session:
        yield Server(session, f"{base}/v1")


def _base(url: str) -> str:
    """Without `/v1`.

    Raises:
        BenchError: when no server can be there.
    """
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"--url: {url!r} does not begin with http:// or https://")
    try:
        parts = urlsplit(url)
        why = "" if parts.hostname else "it names no host"
        _ = parts.port
    except ValueError as error:
        why = str(error)
    if why:
        raise BenchError(
            f"--url: {url!r} is no address of a server ({why}); give one like http://127.0.0.1:8000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _trusting(cacert: Path, base: str) -> ssl.SSLContext:
    if not base.startswith("https://"):
        raise BenchError("--cacert: counts for nothing with http://; leave it out, or give https://")
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:
        raise BenchError(f"--cacert: {cacert}: no certificates can be read ({error.strerror})") from None


def _raise_descriptor_limit() -> None:
    """Each request has a descriptor while it is open; the limit that a shell gives is often 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems take less than the limit that they tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
            self._error, self._said = _name(whole), _message(whole)
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
            code, self._said = _code(whole), _message(whole)
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


def _code(event: Any) -> str:
    """The `code` of an OpenAI error, or its type; servers put the HTTP status there, too."""
    error = event.get("error", event) if isinstance(event, dict) else event
    if not isinstance(error, dict):
        return ""
    return str(next((error[key] for key in ("code", "type") if isinstance(error.get(key), str)), ""))


def _message(event: Any) -> str:
    """What an error says, in one line that a terminal can print."""
    error = (event.get("error") or event) if isinstance(event, dict) else event
    text = error.get("message") if isinstance(error, dict) else error
    if not isinstance(text, str):
        return ""
    line = " ".join(text.split())
    return "".join(filter(str.isprintable, line))[:_LONGEST_MESSAGE]


def _name(event: dict[str, Any]) -> str:
    """What an error in a stream is called: as `_code` has it, else its status, else what it says."""
    error = event.get("error") or event
    if isinstance(error, dict):
        error = _code(error) or error.get("code") or error.get("message") or "error"
    return str(error)[:_MOST_CHARACTERS]
