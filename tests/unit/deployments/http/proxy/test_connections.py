"""Connections with several requests: sent before the answer, or for ever."""

import asyncio
import gc
import time
import weakref

import httpx
import pytest
from certificates import self_signed
from limited_proxy import EVENT, EVENTS, LIMITS, connect, head, serving
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from waiting import until

from deployments.config.tls import TLSConfig


async def test_a_client_that_sends_another_request_before_the_answer_and_leaves_is_noticed(served):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(head("/long"))
    await reader.readuntil(b"\r\n\r\n")
    writer.write(head("/long") + head("/long", length=3) + b"abc")
    await asyncio.sleep(0.1)
    writer.transport.abort()
    await until(lambda: not proxy.streaming, within_s=10)
    assert (proxy.asked, proxy.left) == (1, 1)


WEB_SOCKET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


@pytest.mark.parametrize("another", [head(length=2) + b"{}", WEB_SOCKET], ids=["post", "web socket"])
async def test_a_connection_ends_with_the_answer_that_another_request_did_not_wait_for(served, another):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(head(length=2) + b"{}" + another)
    answer = await reader.read()
    assert answer.count(b"200 OK") == answer.count(EVENT) == proxy.asked == 1
    assert b"connection: close\r\n" in answer
    writer.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_connection_that_always_has_something_to_ask_does_not_last_for_ever(
    monkeypatch, tmp_path, is_encrypted
):
    """It would never reach an ingress that has come since, and be cut when the one it knows goes.

    Whoever is closed in time is looked at once more when a slow reader would be cut, and is gone then.
    """
    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
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
        assert limits.connection_age_s + limits.write_timeout_s < 1.5
    assert not raised


@pytest.mark.parametrize("closes", ["", "connection: close\r\n"], ids=["by its client", "by the server"])
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_nothing_keeps_a_connection_that_has_ended(monkeypatch, tmp_path, is_encrypted, closes):
    """Not for as long as a reader may take, with what TLS has for it."""
    made, come = HttpToolsProtocol.connection_made, []

    def connection_made(connection, transport):
        come.append(weakref.ref(transport))
        made(connection, transport)

    monkeypatch.setattr(HttpToolsProtocol, "connection_made", connection_made)
    limits = LIMITS.model_copy(update={"write_timeout_s": 60.0})
    certificate = self_signed(tmp_path)
    tls = TLSConfig(certificate=certificate.certificate, key=certificate.key)
    options, trust = (tls.http_options(), tls.trust()) if is_encrypted else ({}, None)
    async with serving(monkeypatch, limits, **options) as (_, port, _), asyncio.timeout(10):
        reader, writer = await connect(port, trust)
        writer.write(head().replace(b"host:", f"{closes}host:".encode()))
        answer = b""
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            answer += await reader.read(4096)
        writer.close()
        (transport,) = come
        while transport() is not None:
            await asyncio.sleep(0.01)
            gc.collect()
