"""A real HTTP server that streams OpenAI completions, one prompt after the other, as slowly as it is told."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Behaviour:
    """How the server answers.

    `seconds` says how long a prompt of so many tokens takes before its first token; they wait for each other
    if `is_serial`. `refuse` answers a request with an error if it returns a status and an error; `event` is
    sent as it is after the first token. After `lasts` requests it is gone, with the next one unanswered.
    `tls` has it speak HTTPS.
    """

    seconds: object = lambda tokens: 0.0
    is_serial: bool = False
    refuse: object = lambda body, headers: None
    error_after: int | None = None
    cut_after: int | None = None
    event: bytes | None = None
    tpot_s: float = 0.0
    key: str | None = None
    models: tuple[str, ...] = ("tiny", "other")
    lasts: int | None = None
    tls: ssl.SSLContext | None = None


@dataclass
class Seen:
    at_s: float
    body: dict
    headers: dict


@dataclass
class CompletionsServer:
    behaviour: Behaviour = field(default_factory=Behaviour)
    seen: list[Seen] = field(default_factory=list)
    listed_s: list[float] = field(default_factory=list)
    """When it was asked for its models."""
    url: str = ""

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_):
        with suppress(RuntimeError):  # the loop of one that is gone is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self, started):
        self._loop, self._stop, self._turn = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        tls = self.behaviour.tls
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request):
        self.listed_s.append(time.perf_counter())
        if self.behaviour.key and request.headers.get("authorization") != f"Bearer {self.behaviour.key}":
            return web.json_response({"error": {"code": "invalid_api_key"}}, status=401)
        return web.json_response({"data": [{"id": name} for name in self.behaviour.models]})

    async def _completions(self, request):
        arrived_s = time.perf_counter()
        body, behaviour = await request.json(), self.behaviour
        self.seen.append(Seen(arrived_s, body, dict(request.headers)))
        if len(self.seen) - 1 == behaviour.lasts:
            self._stop.set()
            request.transport.abort()
            return web.Response()
        if refusal := behaviour.refuse(body, request.headers):
            status, error = refusal
            return web.json_response({"error": error}, status=status)
        if behaviour.is_serial:
            async with self._turn:
                await asyncio.sleep(behaviour.seconds(len(body["prompt"])))
        else:
            await asyncio.sleep(behaviour.seconds(len(body["prompt"])))
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for number in range(body["max_tokens"]):
            if number == behaviour.error_after:
                await self._event(stream, {"error": {"code": "engine_error", "message": "it broke"}})
                return stream
            if number == behaviour.cut_after:
                return stream
            await self._event(stream, {"choices": [{"index": 0, "text": "x"}], "usage": None})
            if number == 0 and behaviour.event is not None:
                await stream.write(b"data: " + behaviour.event + b"\n\n")
            await asyncio.sleep(behaviour.tpot_s)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        await self._event(stream, {"choices": [], "usage": usage})
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _event(self, stream, event):
        await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")
