"""Upgrades that are not spoken are ignored; web sockets are upgrades still, and there are no tunnels."""

import asyncio
import gc
import weakref

import pytest
from limited_proxy import PATIENT, connect, head, serving

from deployments.http.connecting import upgrades

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
