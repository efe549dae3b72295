"""A connection to an OpenAI-compatible server, for the commands that ask one.

Owns the session: address, key, certificates and descriptors; and what an error of such a server says. It is
built on aiohttp, like the client of `vllm bench serve`.
"""

from __future__ import annotations

import resource
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

_OK: Final = 200
_KEEP_ALIVE_S: Final = 2.0
"""Less than servers wait before they close an idle connection, so that no request meets one being closed."""
_LONGEST_MESSAGE: Final = 300
_LOOK: Final = aiohttp.ClientTimeout(total=10)


@dataclass(frozen=True, slots=True)
class Connection:
    """A server that is connected to.

    Attributes:
        url: Of its API, with `/v1`.
        refusal: What is raised where it cannot be asked as wanted.
    """

    session: aiohttp.ClientSession
    url: str
    refusal: type[Exception]

    async def models(self) -> list[str] | None:
        """The names of the models that it serves; None when it has no such list.

        Raises:
            Exception: of the kind `refusal`, when it cannot be reached, or wants another key.
        """
        try:
            async with self.session.get(f"{self.url}/models", timeout=_LOOK) as response:
                if response.status in {401, 403}:
                    raise self.refusal(f"{self.url} refuses the API key ({response.status}); give --api-key")
                if response.status != _OK:
                    return None
                return [str(model["id"]) for model in (await response.json(content_type=None))["data"]]
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
            raise self.refusal(
                f"{self.url}: this client does not trust the server's certificate ({why}); give "
                "--cacert FILE, with the certificate or that of who signed it"
            ) from None
        except aiohttp.ClientConnectorSSLError as error:
            raise self.refusal(
                f"{self.url} does not speak TLS as this client does ({error.strerror}); is it http://?"
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise self.refusal(f"{self.url} cannot be reached: {why}; is the server running?") from None
        except (ValueError, KeyError, TypeError):
            raise self.refusal(f"{self.url}/models does not answer as the OpenAI API does") from None


@asynccontextmanager
async def connection(
    url: str,
    api_key: str | None,
    timeout_s: float,
    refusal: type[Exception],
    cacert: Path | None = None,
    connect_s: float | None = None,
) -> AsyncIterator[Connection]:
    """Connect to the server at `url`, given with or without `/v1`; requests longer than `timeout_s` fail.

    So do those that have no connection after `connect_s`, where that is given, with an error of their own.
    With `cacert`, its certificates are trusted and no others. From then on this process may have as many
    connections as the system lets it.

    Raises:
        Exception: of the kind `refusal`, when an option is of no use; the message names it.
    """
    base = _base(url, refusal)
    trust = True if cacert is None else _trusting(cacert, base, refusal)
    _raise_descriptor_limit()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=trust),
        timeout=aiohttp.ClientTimeout(total=timeout_s, connect=connect_s),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
    ) as session:
        yield Connection(session, f"{base}/v1", refusal)


def _base(url: str, refusal: type[Exception]) -> str:
    """Without `/v1`; refused when no server can be there, or it has what nobody may read."""
    if "@" in url:  # not shown: what stands before it may be a password, however the rest is spelt
        raise refusal(
            "--url: an address is printed and kept, so it must have no user and password, nor any other '@'; "
            "give a key with --api-key or OPENAI_API_KEY"
        )
    if not url.startswith(("http://", "https://")):
        raise refusal(f"--url: {url!r} does not begin with http:// or https://")
    try:
        parts = urlsplit(url)
        why = "" if parts.hostname else "it names no host"
        _ = parts.port
    except ValueError as error:
        why = str(error)
    if why:
        raise refusal(
            f"--url: {url!r} is no address of a server ({why}); give one like http://127.0.0.1:8000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _trusting(cacert: Path, base: str, refusal: type[Exception]) -> ssl.SSLContext:
    if not base.startswith("https://"):
        raise refusal("--cacert: counts for nothing with http://; leave it out, or give https://")
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:
        raise refusal(f"--cacert: {cacert}: no certificates can be read ({error.strerror})") from None


def _raise_descriptor_limit() -> None:
    """Each request has a descriptor while it is open; the limit that a shell gives is often 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems take less than the limit that they tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def error_code(event: Any) -> str:
    """The `code` of an OpenAI error, or its type; servers put the HTTP status there, too."""
    error = event.get("error", event) if isinstance(event, dict) else event
    if not isinstance(error, dict):
        return ""
    return str(next((error[key] for key in ("code", "type") if isinstance(error.get(key), str)), ""))


def error_message(event: Any) -> str:
    """What an error says, in one line that a terminal can print."""
    error = (event.get("error") or event) if isinstance(event, dict) else event
    text = error.get("message") if isinstance(error, dict) else error
    if not isinstance(text, str):
        return ""
    line = " ".join(text.split())
    return "".join(filter(str.isprintable, line))[:_LONGEST_MESSAGE]
