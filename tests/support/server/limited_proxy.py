"""A real server with the proxy's limits, and clients that send and read as slowly as a test says."""

import asyncio
import contextlib
import socket
import time

import httpx
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from waiting import until

from deployments.config.limits import LimitsConfig
from deployments.http.proxy import LIMITS_VARIABLE, middlewares

LIMITS = LimitsConfig(
    max_body_bytes=100_000,
    max_bytes_in_flight=250_000,
    body_timeout_s=0.6,
    header_timeout_s=0.5,
    write_timeout_s=0.5,
)
PATIENT = LIMITS.model_copy(update={"body_timeout_s": 20.0, "header_timeout_s": 20.0})
PATCHED = (
    "connection_made",
    "connection_lost",
    "data_received",
    "eof_received",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "timeout_keep_alive_handler",
)
EVENTS = {"/long": 3000, "/longer-than-buffers": 500, "/in-all-buffers": 80, "/in-the-buffers": 30}
EVENT = b"data: " + b"x" * 2000 + b"\n\n"
IN_ONE_PIECE = "/in-one-piece"
"""As much as `/long`."""


class Proxy:
    """As Serve's: reads the body to its end, answers with a stream, and cancels when the client has gone."""

    def __init__(self):
        self.asked = self.streaming = self.left = 0
        self.clients = set()
        self.bodies = []
        self.may_read, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_read.set()
        self.may_answer.set()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close"})
            return
        self.asked += 1
        self.headers = dict(scope["headers"])
        self.clients.add(scope["client"])
        await self.may_read.wait()
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        self.bodies.append(body + message.get("body", b""))
        if message["type"] == "http.disconnect":
            self.left += 1
            return
        await self.may_answer.wait()
        if scope["path"] == IN_ONE_PIECE:
            await Response(EVENT * 3000)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        events = EVENTS.get(scope["path"], 1)
        gone = asyncio.ensure_future(receive())
        self.streaming += 1
        try:
            for _ in range(events):
                if gone.done():
                    self.left += 1
                    return
                await send({"type": "http.response.body", "body": EVENT, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.streaming -= 1
            gone.cancel()


@contextlib.asynccontextmanager
async def serving(monkeypatch, limits=LIMITS, **options):
    """The proxy, its port, and what bounds its clients."""
    kept = {name: getattr(HttpToolsProtocol, name) for name in PATCHED}
    monkeypatch.setenv(LIMITS_VARIABLE, limits.model_dump_json())
    proxy = Proxy()
    app = proxy
    for middleware in middlewares():  # as Serve puts them around its proxy
        app = middleware.cls(app, **middleware.kwargs)
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, http="httptools", **options))
    running = asyncio.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started)
    yield proxy, listening.getsockname()[1], app
    server.should_exit = True
    server.force_exit = True
    await running
    for name, method in kept.items():
        setattr(HttpToolsProtocol, name, method)


def head(path="/", length=0):
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


async def connect(port, trust=None):
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    name = None if trust is None else "127.0.0.1"
    return await asyncio.open_connection(sock=raw, limit=1024, ssl=trust, server_hostname=name)


async def closed_after_s(reader):
    """When the server closes a connection from which its client does not read."""
    started_s = time.monotonic()
    with contextlib.suppress(ConnectionError):
        await reader.read()
    return time.monotonic() - started_s


async def post(port, content=b"{}"):
    async with httpx.AsyncClient() as client:
        return await client.post(f"http://127.0.0.1:{port}/", content=content)


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
