"""A real HTTP server that answers as a function says, in whole answers."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from aiohttp import web


def said(status=200, body=None, headers=None):
    """An answer with JSON."""
    return web.json_response({"text": "x"} if body is None else body, status=status, headers=headers)


@dataclass
class AnsweringServer:
    """Serves on a port of its own, or on `port`, while it is entered.

    `answer` gets a request's body, and the request, and returns a response, or awaits one.
    """

    answer: object = lambda *_: said()
    port: int = 0
    models: tuple[str, ...] | None = ("tiny",)
    seen: list[tuple[str, dict, dict]] = field(default_factory=list)
    url: str = ""
    most: int = 0

    def __enter__(self):
        started = threading.Event()
        self._running, self._open = 0, set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self, started):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/{path:.*}", self._post)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        started.set()
        await self._stop.wait()
        for transport in self._open:
            transport.abort()
        await runner.cleanup()

    async def _list(self, request):
        if self.models is None:
            return web.json_response({}, status=404)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _post(self, request):
        body = await request.json()
        self.seen.append((request.path, body, dict(request.headers)))
        self._running += 1
        self._open.add(request.transport)
        self.most = max(self.most, self._running)
        try:
            answer = self.answer(body, request)
            return await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self._running -= 1
