"""Clients that send or read slowly, against a real server with the proxy's limits."""

import asyncio
import contextlib
import gc
import pickle
import socket
import time
import weakref

import httpx
import pytest
import uvicorn
from certificates import self_signed
from ray.serve._private.http_util import MessageQueue
from ray.serve._private.proxy import HTTPProxy
from starlette.requests import Request
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.config.limits import LimitsConfig
from deployments.config.tls import TLSConfig
from deployments.http.connecting import upgrades
from deployments.http.door import EndsWithItsClient
from deployments.http.gatekeeper import Gatekeeper
from deployments.http.proxy import LIMITS_VARIABLE, ConnectionLimits, ReadyUntilDrained, middlewares
from slo.admission.tenants import KeyRing

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
    "data_received",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "timeout_keep_alive_handler",
)
ESTABLISHED = 1
EVENTS = {"/long": 3000, "/longer-than-buffers": 500, "/in-all-buffers": 80, "/in-the-buffers": 30}
EVENT = b"data: " + b"x" * 2000 + b"\n\n"


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
    while not server.started:  # noqa: ASYNC110 - uvicorn tells in no other way
        await asyncio.sleep(0.01)
    yield proxy, listening.getsockname()[1], app
    server.should_exit = True
    server.force_exit = True
    await running
    for name, method in kept.items():
        setattr(HttpToolsProtocol, name, method)


@pytest.fixture
async def served(monkeypatch):
    async with serving(monkeypatch) as found:
        yield found


def state_of(client):
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


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


async def test_others_are_served(served):
    _, port, _ = served
    answer = await post(port)
    assert (answer.status_code, answer.content) == (200, EVENT)


async def test_headers_that_do_not_end(served):
    _, port, _ = served
    for sent in (b"", b"POST / HTTP/1.1\r\nhost: x\r\nx-a:"):
        reader, writer = await connect(port)
        writer.write(sent)
        assert 0.3 < await closed_after_s(reader) < 2
        writer.close()


async def test_the_second_request_of_a_connection_is_held_to_it_as_well(served):
    _, port, _ = served
    reader, writer = await connect(port)
    writer.write(head())
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"POST / HTTP/1.1\r\nx-slow:")
    assert await closed_after_s(reader) < 2
    writer.close()


async def test_a_client_that_sends_another_request_before_the_answer_and_leaves_is_noticed(served):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(head("/long"))
    await reader.readuntil(b"\r\n\r\n")
    writer.write(head("/long") + head("/long", length=3) + b"abc")
    await asyncio.sleep(0.1)
    writer.transport.abort()
    async with asyncio.timeout(10):
        while proxy.streaming:  # noqa: ASYNC110 - the proxy tells in no other way
            await asyncio.sleep(0.01)
    assert (proxy.asked, proxy.left) == (1, 1)


async def test_a_connection_ends_with_the_answer_that_another_request_did_not_wait_for(served):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(head(length=2) + b"{}" + head(length=2) + b"{}")
    answer = await reader.read()
    assert answer.count(b"200 OK") == answer.count(EVENT) == proxy.asked == 1
    assert b"connection: close\r\n" in answer
    writer.close()


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        pytest.param(b"POST / HTTP/1.1\r\nhost: x\r\n", b"a:\r\n", id="headers"),
        pytest.param(b"POST / HTTP/1.1\r\nhost: x\r\na: ", b"a", id="a header"),
        pytest.param(b"POST /", b"a", id="a URL"),
        pytest.param(b"", b"\r\n", id="nothing"),
        pytest.param(head() + b"POST /", b"a", id="the URL of a second request"),
        pytest.param(CHUNKED + b"1\r\nx\r\n0\r\n", b"a:\r\n", id="what ends a body in pieces"),
    ],
)
async def test_a_head_that_is_sent_for_ever_holds_up_nobody(monkeypatch, begins, goes_on):
    others_s = []

    async def send(writer, port):
        writer.write(begins)
        for _ in range(100):
            writer.write(goes_on * (65_536 // len(goes_on)))
            await writer.drain()
            started_s = time.monotonic()
            assert (await post(port)).status_code == 200
            others_s.append(time.monotonic() - started_s)

    async with serving(monkeypatch, PATIENT) as (_, port, app):
        _, writer = await connect(port)
        with pytest.raises(ConnectionError):
            await send(writer, port)
        assert len(others_s) < 20
        assert max(others_s, default=0) < 1
        assert app._in_flight_bytes == 0
        writer.close()


@pytest.mark.parametrize("begins", [b"POST /", b"POST / HTTP/1.1\r\nhost: x\r\na: "])
async def test_who_sends_too_large_a_head_is_told_so(monkeypatch, begins):
    async with serving(monkeypatch, PATIENT) as (proxy, port, _):
        reader, writer = await connect(port)
        writer.write(begins + b"a" * 30_000)
        answer = await reader.read(4096)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b"headers_too_large" in answer
        assert b"limits.max_header_bytes" in answer
        assert await reader.read() == b""
        assert not proxy.asked
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(head(length=99_000) + b"x" * 99_000, id="a body"),
        pytest.param(CHUNKED + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n", id="a body in pieces"),
        pytest.param(
            b"POST /" + b"a" * 8000 + b" HTTP/1.1\r\n" + (b"a: " + b"b" * 162 + b"\r\n") * 100 + b"\r\n",
            id="as large a head as may be",
        ),
    ],
)
async def test_what_comes_in_one_piece_with_its_head_passes_and_so_does_the_next(monkeypatch, sent):
    async with serving(monkeypatch, PATIENT) as (proxy, port, _):
        reader, writer = await connect(port)
        for number in range(1, 4):
            writer.write(sent)
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += (piece := await reader.read(4096))
                assert piece, answer
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert proxy.asked == number
        writer.close()


H2C = b"""POST /v1/completions HTTP/1.1\r
Connection: Upgrade, HTTP2-Settings\r
Host: x\r
HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r
%b\r
Upgrade: h2c\r
User-Agent: Java-http-client/21.0.2\r
\r
"""
"""As the JDK's HTTP client posts in clear."""


def h2c(body):
    return H2C % b"Content-Length: %d" % len(body) + body


def h2c_in_chunks(body):
    chunks = (body[at : at + 1000] for at in range(0, len(body), 1000))
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return H2C % b"Transfer-Encoding: chunked" + pieces + b"0\r\n\r\n"


async def one_answer(reader):
    answer = b""
    while not answer.endswith(b"\r\n0\r\n\r\n"):
        answer += (piece := await asyncio.wait_for(reader.read(4096), 5))
        assert piece, answer
    return answer


SMALL, LARGE = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 3, b"GET / HTTP/1.1\r\n\r\n" * 5000
AT_ONCE = 10**9


@pytest.mark.parametrize(
    ("sent", "body", "piece_bytes"),
    [
        pytest.param(h2c(SMALL), SMALL, AT_ONCE, id="in one piece"),
        pytest.param(h2c(SMALL), SMALL, len(h2c(SMALL)) - len(SMALL), id="the body behind the head"),
        pytest.param(h2c(SMALL), SMALL, 7, id="in small pieces"),
        pytest.param(h2c(b""), b"", AT_ONCE, id="no body"),
        pytest.param(h2c(LARGE), LARGE, AT_ONCE, id="a large body in one piece"),
        pytest.param(h2c(LARGE), LARGE, 10_000, id="a large body in pieces"),
        pytest.param(h2c_in_chunks(SMALL), SMALL, AT_ONCE, id="in chunks"),
        pytest.param(h2c_in_chunks(LARGE), LARGE, 9_999, id="in chunks, and in pieces"),
    ],
)
async def test_an_upgrade_that_is_not_spoken_is_ignored(monkeypatch, sent, body, piece_bytes):
    async with serving(monkeypatch, PATIENT) as (proxy, port, app):
        reader, writer = await connect(port)
        for number in range(1, 4):
            for at in range(0, len(sent), piece_bytes):
                writer.write(sent[at : at + piece_bytes])
                await writer.drain()
                await asyncio.sleep(0.001)
            answer = await one_answer(reader)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert answer.count(b"HTTP/1.1 ") == 1
            assert proxy.bodies == [body] * number
            assert proxy.headers[b"user-agent"] == b"Java-http-client/21.0.2"
            assert b"upgrade" not in proxy.headers
        writer.write(head(length=2) + b"{}")
        assert b"HTTP/1.1 200 OK" in await one_answer(reader)
        assert proxy.bodies == [*[body] * 3, b"{}"]
        assert app._in_flight_bytes == 0
        writer.close()
        assert await reader.read() == b""


async def test_nothing_is_left_of_a_connection_that_has_ended(monkeypatch):
    made = []

    class Watched(upgrades.RequestParser):
        def __init__(self, connection):
            made.append(weakref.ref(connection))
            super().__init__(connection)

    monkeypatch.setattr(upgrades, "RequestParser", Watched)
    async with serving(monkeypatch, PATIENT) as (_, port, _):
        gc.disable()
        try:
            for sent in (h2c(SMALL), head(length=2) + b"{}"):
                reader, writer = await connect(port)
                writer.write(sent)
                await one_answer(reader)
                writer.close()
                await writer.wait_closed()
            await asyncio.sleep(0.2)
            assert [connection() for connection in made] == [None, None]
        finally:
            gc.enable()


async def test_an_upgrade_bounds_its_body_and_its_successor_as_without(served):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(H2C % b"Content-Length: 100" + b"{")
    assert b" 408 " in await reader.read(4096)
    writer.close()
    reader, writer = await connect(port)
    writer.write(h2c(b"{}") + h2c(b"[]"))
    answer = await reader.read()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close\r\n" in answer
    assert proxy.bodies == [b"{}"]
    writer.close()


async def test_a_web_socket_is_an_upgrade_still(served):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    assert b"101 Switching Protocols" in await reader.read(4096)
    assert not proxy.asked
    writer.close()


async def test_there_are_no_tunnels(served):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(b"CONNECT /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not proxy.asked
    writer.close()


@pytest.mark.parametrize("name", ["x-request-timeout-seconds", "x-request-id", "user-agent"])
async def test_a_header_that_is_no_text_is_refused_before_serve_fails_to_read_it(served, name):
    proxy, port, _ = served
    reader, writer = await connect(port)
    sent = f"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n{name}: "
    writer.write(sent.encode() + b"\xff\xfe\r\n\r\n")
    answer = await reader.read()
    assert b" 400 " in answer
    assert f"{name}: is not UTF-8".encode() in answer
    assert not proxy.asked
    writer.close()


@pytest.mark.parametrize(
    "name", ["serve_multiplexed_model_id", "Serve-Multiplexed-Model-Id", "x-session-id", "X_Session_ID"]
)
async def test_serve_hears_of_no_header_by_which_a_client_would_choose_its_ingress(served, name):
    proxy, port, _ = served
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answer = await client.get("/health", headers={name: "a" * 1000, "x-slo-tier": "premium"})
    assert answer.status_code == 200
    assert proxy.headers[b"x-slo-tier"] == b"premium"
    assert not any(b"a" * 1000 in value for value in proxy.headers.values())


async def test_a_body_that_does_not_end(served):
    proxy, port, app = served
    reader, writer = await connect(port)
    writer.write(head(length=1000) + b"{")
    answer = await reader.read(4096)
    assert b"408" in answer
    assert b"limits.body_timeout_s" in answer
    assert not proxy.asked
    assert app._in_flight_bytes == 0
    writer.close()


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large_is_refused_before_it_is_here(served, announced):
    _, port, app = served
    most = 0

    async def body():
        nonlocal most
        for _ in range(400):
            most = max(most, app._in_flight_bytes)
            yield b"x" * 10_000

    headers = {"content-length": "4000000"} if announced else {}
    started_s = time.monotonic()
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", content=body(), headers=headers)
    assert time.monotonic() - started_s < 1
    assert answer.status_code == 413
    assert "limits.max_body_bytes" in answer.text
    assert answer.headers["x-request-id"]
    assert most <= 100_000 + 2 * 65_536, "a piece is at most what uvicorn reads at once"
    assert app._in_flight_bytes == 0


async def test_a_page_reads_why_it_was_refused_here(monkeypatch):
    limits = LIMITS.model_copy(update={"allowed_origins": ("https://chat.example",)})
    async with serving(monkeypatch, limits) as (_, port, _):
        for origin, sent, status in (
            ("https://chat.example", b"content-length: 4000000\r\n\r\n", 413),
            ("https://chat.example", b"content-length: 10\r\n\r\n{", 408),
            ("https://chat.example", b"user-agent: \xff\r\n\r\n", 400),
            ("https://other.example", b"content-length: 4000000\r\n\r\n", 413),
        ):
            reader, writer = await connect(port)
            writer.write(f"POST / HTTP/1.1\r\nhost: x\r\norigin: {origin}\r\n".encode() + sent)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert answer.startswith(b"http/1.1 %d " % status)
            is_allowed = b"access-control-allow-origin: https://chat.example\r\n" in answer
            assert is_allowed is (origin == "https://chat.example")
            assert b"x-request-id" in answer
            writer.close()


async def test_nobody_further_in_hears_of_a_request_before_it_is_whole(served):
    proxy, port, app = served
    reader, writer = await connect(port)
    writer.write(head(length=6) + b"abc")
    while not app._in_flight_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not proxy.asked
    writer.write(b"def")
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    _, other = await connect(port)
    other.write(head(length=6) + b"abc")
    while not app._in_flight_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    other.close()
    while app._in_flight_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert proxy.asked == 1, "one whose client has left meanwhile never goes on"
    writer.close()


async def test_all_bodies_together_are_bounded_that_nobody_has_taken(served):
    proxy, port, app = served
    proxy.may_read.clear()
    waiting = [asyncio.create_task(post(port, b"x" * 80_000)) for _ in range(3)]
    while app._in_flight_bytes < 240_000:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    refused = await post(port, b"x" * 50_000)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "bytes_in_flight"
    assert "limits.max_bytes_in_flight" in refused.json()["error"]["message"]
    proxy.may_read.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3
    assert app._in_flight_bytes == 0
    assert (await post(port, b"x" * 50_000)).status_code == 200


async def test_bodies_that_were_taken_keep_nobody_from_sending_while_they_are_answered(served):
    proxy, port, app = served
    proxy.may_answer.clear()
    waiting = [asyncio.create_task(post(port, b"x" * 80_000)) for _ in range(6)]
    while proxy.asked < 6 or app._in_flight_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    another = asyncio.create_task(post(port, b"x" * 80_000))
    while proxy.asked < 7:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    proxy.may_answer.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting, another)] == [200] * 7


async def test_a_body_counts_until_an_ingress_has_fetched_it_from_serves_proxy():
    """Which takes a request in at once, and keeps it for as long as there is no ingress."""
    queues = []

    async def serves_proxy(scope, receive, send):
        queues.append(queue := MessageQueue())
        await HTTPProxy.proxy_asgi_receive(None, receive, queue)

    connection = asyncio.Queue()
    for number in range(3):
        piece = {"type": "http.request", "body": b"x" * 20_000, "more_body": number < 2}
        connection.put_nowait(piece)
    app = ConnectionLimits(serves_proxy, LIMITS)
    serving = asyncio.create_task(app({"type": "http", "headers": [], "path": "/"}, connection.get, None))
    for _ in range(10):
        await asyncio.sleep(0)
    assert app._in_flight_bytes == 60_000
    (queue,) = queues
    fetched = pickle.loads(pickle.dumps(queue.get_messages_nowait()))  # as Serve's proxy hands them out
    assert {type(message) for message in fetched} == {dict}
    assert b"".join(message["body"] for message in fetched) == b"x" * 60_000
    assert [message["more_body"] for message in fetched] == [True, True, True, False]
    assert app._in_flight_bytes == 0
    assert not serving.done(), "it is being answered"
    connection.put_nowait({"type": "http.disconnect"})
    await serving


@pytest.mark.slow
async def test_a_body_counts_until_a_route_of_the_ingress_has_taken_it():
    from deployments.http.ingress import _taken

    taken = []

    async def route(scope, receive, send):
        request = Request(scope, receive)
        taken.append(len(await _taken(request)))
        assert not hasattr(request, "_body"), "it would be kept until it is answered"
        await asyncio.Event().wait()

    class Keys:
        ring = KeyRing(())

    ingress = EndsWithItsClient(Gatekeeper(route, Keys(), LIMITS))
    app, connection = ConnectionLimits(ingress, LIMITS), asyncio.Queue()
    for number in range(3):
        piece = {"type": "http.request", "body": b"x" * 20_000, "more_body": number < 2}
        connection.put_nowait(piece)
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "headers": headers, "path": "/"}
    answering = asyncio.create_task(app(scope, connection.get, None))
    while not (taken or answering.done()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert taken == [60_000]
    assert app._in_flight_bytes == 0
    connection.put_nowait({"type": "http.disconnect"})
    await answering


async def test_whoever_ends_with_a_body_in_hand_holds_nothing_of_it():
    kept = []

    async def fails(scope, receive, send):
        kept.append(await receive())
        raise ValueError("no")

    connection = asyncio.Queue()
    connection.put_nowait({"type": "http.request", "body": b"x" * 20_000, "more_body": False})
    app = ConnectionLimits(fails, LIMITS)
    with pytest.raises(ValueError, match="no"):
        await app({"type": "http", "headers": [], "path": "/"}, connection.get, None)
    assert app._in_flight_bytes == 0
    kept.clear()
    assert app._in_flight_bytes == 0


async def test_whoever_sends_slowly_keeps_nobody_else_from_sending(monkeypatch):
    async with serving(monkeypatch, PATIENT) as (_, port, app):
        slow = []
        for held in (80_000, 160_000, 240_000):
            slow.append(await connect(port))
            slow[-1][1].write(head(length=90_000) + b"x" * 80_000)
            while app._in_flight_bytes < held:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await post(port, b"x" * 50_000)).status_code == 200
        refused = await asyncio.wait_for(slow[0][0].readuntil(b"}}"), 5)
        assert b" 503 " in refused
        assert b"bytes_in_flight" in refused
        assert app._in_flight_bytes == 160_000, "no more was given up than it took"
        for reader, writer in slow[1:]:
            writer.write(b"x" * 10_000)
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)
        for _, writer in slow:
            writer.close()


async def test_a_client_that_does_not_read_is_left_and_its_request_cancelled(served):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(head("/long"))
    await reader.read(100)
    started_s = time.monotonic()
    while proxy.streaming:
        await asyncio.sleep(0.05)
        assert time.monotonic() - started_s < 5
    assert proxy.left == 1
    assert (await post(port)).status_code == 200
    writer.close()


async def test_an_answer_to_a_client_that_has_left_fails_nowhere(served, caplog):
    proxy, port, _ = served
    proxy.may_answer.clear()
    _, writer = await connect(port)
    writer.write(head())
    while not proxy.bodies:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    writer.transport.abort()
    await asyncio.sleep(0.1)
    proxy.may_answer.set()
    await asyncio.sleep(0.1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_the_kernel_does_not_hide_a_client_that_does_not_read(served):
    """A megabyte, which it would take."""
    proxy, port, _ = served
    _, writer = await connect(port)
    writer.write(head("/longer-than-buffers"))
    started_s = time.monotonic()
    while not proxy.left:
        await asyncio.sleep(0.05)
        assert time.monotonic() - started_s < 5
    writer.close()


@pytest.mark.parametrize(
    ("path", "closes"), [("/long", ""), ("/in-the-buffers", ""), ("/in-all-buffers", "connection: close\r\n")]
)
async def test_the_connection_of_a_client_that_does_not_read_ends_for_it_too(monkeypatch, path, closes):
    """What it has not read would keep it open in the kernel, though the answer had been sent long ago."""
    async with serving(monkeypatch, timeout_keep_alive=1) as (proxy, port, _):
        _, writer = await connect(port)
        client = writer.get_extra_info("socket")
        writer.transport.pause_reading()
        writer.write(head(path).replace(b"host:", f"{closes}host:".encode()))
        started_s = time.monotonic()
        while not proxy.asked or state_of(client) == ESTABLISHED:
            await asyncio.sleep(0.05)
            assert time.monotonic() - started_s < 5
        writer.transport.abort()


async def test_a_client_that_has_read_everything_is_not_cut_off(monkeypatch):
    async with serving(monkeypatch, timeout_keep_alive=1) as (_, port, _):
        reader, writer = await connect(port)
        writer.write(head())
        answer = await reader.read(), await reader.read()
        assert b"200 OK" in answer[0], "then the end, and no reset"
        writer.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_connection_that_always_has_something_to_ask_does_not_last_for_ever(
    monkeypatch, tmp_path, is_encrypted
):
    """It would never reach an ingress that has come since, and be cut when the one it knows goes."""
    limits = LIMITS.model_copy(update={"connection_age_s": 0.4})
    made = self_signed(tmp_path)
    tls = TLSConfig(certificate=made.certificate, key=made.key)
    options, trust = (tls.http_options(), tls.trust()) if is_encrypted else ({}, False)
    scheme = "https" if is_encrypted else "http"
    async with (
        serving(monkeypatch, limits, **options) as (proxy, port, _),
        httpx.AsyncClient(base_url=f"{scheme}://127.0.0.1:{port}", verify=trust) as client,
    ):
        started_s, closed = time.monotonic(), []
        while time.monotonic() - started_s < 1.5:
            answer = await client.post("/in-the-buffers", content=b"{}")
            assert answer.status_code == httpx.codes.OK
            assert len(answer.content) == EVENTS["/in-the-buffers"] * len(EVENT)
            closed.append(answer.headers.get("connection") == "close")
            await asyncio.sleep(0.02)
        assert closed[0] is False
        assert 2 <= sum(closed) <= 4, "more than the last answer of each connection"
        assert len(proxy.clients) == sum(closed) + (not closed[-1])


async def test_hundreds_of_slow_readers_and_uploads_hold_up_nobody(served):
    """As many as the process has descriptors for, on both ends; all are gone soon after."""
    proxy, port, app = served
    slow = []
    for number in range(200):
        reader, writer = await connect(port)
        writer.write(head("/long") if number % 2 else head(length=1000) + b"{")
        slow.append((reader, writer))
    took_s = []
    async with httpx.AsyncClient() as client:
        for _ in range(20):
            started_s = time.monotonic()
            assert (await client.post(f"http://127.0.0.1:{port}/", content=b"{}")).status_code == 200
            took_s.append(time.monotonic() - started_s)
    deadline_s = time.monotonic() + 20
    while proxy.streaming or app._in_flight_bytes:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.1)
    assert sorted(took_s)[10] < 2, took_s
    for _, writer in slow:
        writer.close()


async def test_all_of_it_holds_over_tls(monkeypatch, tmp_path):
    made = self_signed(tmp_path)
    tls = TLSConfig(certificate=made.certificate, key=made.key)
    async with serving(monkeypatch, **tls.http_options()) as (proxy, port, app):
        for sent in (b"", b"POST / HTTP/1.1\r\nhost: x\r\nx-a:"):
            reader, writer = await connect(port, tls.trust())
            writer.write(sent)
            assert 0.3 < await closed_after_s(reader) < 2
            writer.close()
        reader, writer = await connect(port, tls.trust())
        writer.write(b"POST /" + b"a" * 30_000)
        assert b" 431 " in await reader.read(4096)
        writer.close()
        reader, writer = await connect(port, tls.trust())
        writer.write(head(length=1000) + b"{")
        assert b" 408 " in await reader.read(4096)
        writer.close()
        _, writer = await connect(port, tls.trust())
        writer.write(head("/long"))
        left = proxy.left
        started_s = time.monotonic()
        while proxy.left == left:
            await asyncio.sleep(0.05)
            assert time.monotonic() - started_s < 5
        writer.close()
        assert not proxy.streaming
        assert not app._in_flight_bytes
        with pytest.raises(httpx.HTTPError):  # plain
            await post(port)


class Routes:
    """Of Serve's proxy: to one ingress, or to none yet."""

    def __init__(self):
        self.has_replicas = True

    def ready_for_traffic(self, is_head):
        return self.has_replicas, "no replicas"


async def test_a_proxy_that_drains_is_not_ready():
    """Serve ends it when it has drained: who has opened a connection by then is refused."""
    routes, asked = Routes(), []
    drains = HTTPProxy("node", "127.0.0.1", is_head=False, proxy_router=routes, self_actor_name="proxy")

    async def serves_proxy(scope, receive, send):
        if scope["path"] == "/-/healthz":
            await drains(scope, receive, send)
            return
        asked.append(scope["path"])
        await JSONResponse({"status": "ready"})(scope, receive, send)

    transport = httpx.ASGITransport(ReadyUntilDrained(serves_proxy))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:

        async def is_ready():
            answer = await client.get("/ready?degraded")
            assert answer.json()["status"] == ("ready" if answer.is_success else "not ready")
            return answer.status_code

        assert await is_ready() == 200
        drains.update_draining(draining=True)
        assert await is_ready() == 503
        assert (await client.get("/v1/models")).is_success, "what comes all the same is answered"
        drains.update_draining(draining=False)
        assert await is_ready() == 200
        routes.has_replicas = False
        assert await is_ready() == 503
    assert asked == ["/ready", "/v1/models", "/ready"]


def test_a_proxy_without_word_of_limits_has_the_defaults(monkeypatch):
    monkeypatch.delenv(LIMITS_VARIABLE, raising=False)
    kept = {name: getattr(HttpToolsProtocol, name) for name in PATCHED}
    *_, middleware = middlewares()
    for name, method in kept.items():
        setattr(HttpToolsProtocol, name, method)
    assert middleware.cls is ConnectionLimits
    assert middleware.kwargs["limits"] == LimitsConfig()
