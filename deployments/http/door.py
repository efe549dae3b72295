"""The port of `slackserve serve`: held by the command, answered by the ingresses themselves.

Serve's proxy before an ingress is one process and two hand-overs more on the way of every first token. Here
the command listens, and hands the listening socket to each ingress (SCM_RIGHTS), which accepts from it.
Connections that no ingress has accepted wait in the kernel, also while the only one is being replaced. On a
Ray cluster nobody holds a door, and Serve's proxies take the requests.

Owns the socket, its way between processes, and what Serve's proxy does for a request otherwise: an id, and
the end of what its client has left. What a connection may hold is `deployments.http.proxy`'s, here as there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import uvicorn
from starlette.datastructures import MutableHeaders

from deployments.http.proxy import bounded
from slo.request import REQUEST_ID_HEADER
from telemetry import logs
from telemetry.tracing import BEGINS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deployments.config.limits import LimitsConfig

VARIABLE: Final = "SLACKSERVE_DOOR"
"""In an ingress's environment, as JSON: who hands out its listening socket, and how TLS is spoken on it."""
_QUEUE: Final = 4096
"""Connections that may wait to be accepted; the kernel takes `net.core.somaxconn` if that is less."""
_PEER: Final = struct.Struct("3i")
"""Process, user and group of whoever is at the other end of a Unix socket."""


class Door:
    """The listening socket, and the thread that hands it to processes of the same user.

    It listens from the first hand-over on: before there is an ingress, connections are refused.
    """

    def __init__(self, listener: socket.socket, tls: Mapping[str, str]) -> None:
        self._listener = listener
        self._tls = dict(tls)
        self._name = f"slackserve-door-{secrets.token_hex(16)}"
        self._hatch = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._hatch.bind(f"\0{self._name}")
        self._hatch.listen()
        threading.Thread(target=self._hand_out, name="door", daemon=True).start()

    @classmethod
    def at(cls, host: str, port: int, tls: Mapping[str, str]) -> Self:
        """Take a port.

        Args:
            host: An address of this machine.
            port: Its port.
            tls: Paths of `ssl_certfile` and `ssl_keyfile`, or nothing for plain HTTP.

        Raises:
            OSError: when it cannot be had.
        """
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError:
            listener.close()
            raise
        # Until somebody listens, Linux would let another that sets this have the port as well. Before 6.8 it
        # does so all the same, and of the two one cannot listen then.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return cls(listener, tls)

    def environment(self) -> dict[str, str]:
        """What an ingress needs to open it."""
        return {
            VARIABLE: json.dumps({"name": self._name, "tls": self._tls}),
            BEGINS_VARIABLE: "ingress",
        }

    def close(self) -> None:
        """Give the port back; ingresses that have it serve on until they end."""
        with contextlib.suppress(OSError):
            self._hatch.shutdown(socket.SHUT_RDWR)
        self._hatch.close()
        self._listener.close()

    def _hand_out(self) -> None:
        while True:
            try:
                asking, _ = self._hatch.accept()
            except OSError:
                return  # closed
            with asking, contextlib.suppress(OSError):
                peer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                if _PEER.unpack(peer)[1] == os.geteuid():
                    self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    self._listener.listen(_QUEUE)
                    socket.send_fds(asking, [b"."], [self._listener.fileno()])


def listener_of(name: str) -> socket.socket:
    """The listening socket that the `Door` of this name hands out.

    Raises:
        OSError: when it does not.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hatch:
        hatch.connect(f"\0{name}")
        _, descriptors, _, _ = socket.recv_fds(hatch, 1, 1)
    if not descriptors:
        raise OSError(f"{name} hands out no socket")
    return socket.socket(fileno=descriptors[0])


@asynccontextmanager
async def opened(
    app: ASGIApp, limits: LimitsConfig, in_place: Callable[[], Coroutine[Any, Any, Any]]
) -> AsyncIterator[None]:
    """Answer what comes in at the door with `app`, on the running loop; nothing where nobody holds one.

    Args:
        app: What answers.
        limits: What a connection may hold.
        in_place: Ends when it can answer; until then connections wait.

    Raises:
        OSError: when the door that the environment names is closed, or a file of TLS is not there.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        yield
        return
    door = json.loads(given)
    # As in Serve's proxy: what a client sends makes no line of its own.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        bounded(RequestIds(EndsWithItsClient(app)), limits),
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=limits.idle_timeout_s,
        backlog=_QUEUE,
        **door["tls"],
    )
    config.load()  # what is wrong with a certificate keeps the ingress from starting
    listener = listener_of(door["name"])
    server = _Server(config)

    placing = asyncio.create_task(in_place(), name="in_place")

    async def serve() -> None:
        await asyncio.wait([placing])
        if not placing.cancelled():
            placing.result()
            await server.serve(sockets=[listener])

    serving = asyncio.create_task(serve(), name="door")
    try:
        yield
    finally:
        server.should_exit = True
        placing.cancel()
        await serving


class _Server(uvicorn.Server):
    """Leaves the process's signals to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class RequestIds:
    """Gives a request an id if its client gave none, and puts it on the answer, as Serve's proxy does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; part of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request_id = headers.get(REQUEST_ID_HEADER)
        if request_id is None:
            request_id = str(uuid.uuid4())
            headers.append(REQUEST_ID_HEADER, request_id)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append(REQUEST_ID_HEADER, request_id)
            await send(message)

        await self._app(scope, receive, named)


class EndsWithItsClient:
    """Cancels what is done for a client that has left, as Serve does behind its proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; part of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived: asyncio.Queue[Message] = asyncio.Queue()
        gone: Message | None = None
        is_answered = False

        async def watch() -> None:
            nonlocal gone
            while gone is None:
                message = await receive()
                if message["type"] == "http.disconnect":
                    gone = message
                arrived.put_nowait(message)

        async def next_message() -> Message:
            return gone if gone is not None and arrived.empty() else await arrived.get()

        async def answer(message: Message) -> None:
            nonlocal is_answered
            await send(message)
            is_answered = message["type"] == "http.response.body" and not message.get("more_body", False)

        async def run() -> None:
            await self._app(scope, next_message, answer)

        answering = asyncio.create_task(run())
        watching = asyncio.create_task(watch())
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not is_answered:
                answering.cancel()
            await _ended(answering)
        finally:
            for task in (answering, watching):
                task.cancel()


async def _ended(answering: asyncio.Task[Any]) -> None:
    """Wait until a request has ended.

    Raises:
        Exception: as the application does, which has the connection closed.
    """
    try:
        await asyncio.shield(answering)
    except asyncio.CancelledError:
        if not answering.cancelled():  # the server ends
            raise
    except Exception as error:
        logs.event("answer_broken", level=logging.ERROR, error=repr(error)[:2000])
        raise
