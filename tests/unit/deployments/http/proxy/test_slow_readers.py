"""Clients that do not read, or have left before their answer."""

import asyncio
import socket

import pytest
from certificates import self_signed
from limited_proxy import EVENT, IN_ONE_PIECE, connect, head, post, serving
from waiting import until

from deployments.config.tls import TLSConfig

ESTABLISHED, CLOSED = 1, 7


def state_of(client):
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


async def unread(port, request, trust=None):
    """A client that sends a request and reads nothing, and its socket."""
    _, writer = await connect(port, trust)
    writer.transport.pause_reading()
    writer.write(request)
    return writer, writer.get_extra_info("socket")


async def test_a_client_that_does_not_read_is_left_and_its_request_cancelled(served):
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(head("/long"))
    await reader.read(100)
    await until(lambda: not proxy.streaming)
    assert proxy.left == 1
    assert (await post(port)).status_code == 200
    writer.close()


async def test_an_answer_to_a_client_that_has_left_fails_nowhere(served, caplog):
    proxy, port, _ = served
    proxy.may_answer.clear()
    _, writer = await connect(port)
    writer.write(head())
    await until(lambda: proxy.bodies)
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
    await until(lambda: proxy.left)
    writer.close()


@pytest.mark.parametrize(
    ("path", "closes"), [("/long", ""), ("/in-the-buffers", ""), ("/in-all-buffers", "connection: close\r\n")]
)
async def test_the_connection_of_a_client_that_does_not_read_ends_for_it_too(monkeypatch, path, closes):
    """What it has not read would keep it open in the kernel, though the answer had been sent long ago."""
    async with serving(monkeypatch, timeout_keep_alive=1) as (proxy, port, _):
        request = head(path).replace(b"host:", f"{closes}host:".encode())
        writer, client = await unread(port, request)
        await until(lambda: proxy.asked and state_of(client) != ESTABLISHED)
        writer.transport.abort()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_an_answer_in_one_piece_is_bounded_as_a_stream_is(monkeypatch, tmp_path, is_encrypted):
    made = self_signed(tmp_path)
    tls = TLSConfig(certificate=made.certificate, key=made.key)
    options, trust = (tls.http_options(), tls.trust()) if is_encrypted else ({}, None)
    async with serving(monkeypatch, timeout_keep_alive=60, **options) as (proxy, port, _):
        writer, client = await unread(port, head(IN_ONE_PIECE), trust)
        await until(lambda: proxy.asked and state_of(client) != ESTABLISHED)
        writer.transport.abort()


async def test_an_answer_in_one_piece_is_whole_for_whoever_reads_it_and_so_is_the_next(served):
    _, port, _ = served
    reader, writer = await connect(port)
    for _ in range(3):
        writer.write(head(IN_ONE_PIECE))
        async with asyncio.timeout(5):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(3000 * len(EVENT)) == EVENT * 3000
    writer.close()


async def test_a_connection_that_its_client_has_half_closed_ends_though_that_does_not_read(monkeypatch):
    async with serving(monkeypatch, timeout_keep_alive=60) as (proxy, port, _):
        writer, client = await unread(port, head("/in-all-buffers"))
        await until(lambda: proxy.asked and not proxy.streaming)
        writer.write_eof()
        await until(lambda: state_of(client) == CLOSED)
        writer.transport.abort()


async def test_a_large_answer_may_take_its_reader_longer_than_a_small_one(served):
    """Six megabytes at four a second, where half a second is the limit for one."""
    proxy, port, _ = served
    reader, writer = await connect(port)
    writer.write(head(IN_ONE_PIECE))
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(10):
        await reader.readexactly(300 * len(EVENT))
        await asyncio.sleep(0.15)
    assert not proxy.left
    writer.close()


@pytest.mark.parametrize("then", [b"POST /", b"\0"], ids=["a slow head", "no HTTP"])
async def test_a_connection_that_is_closed_ends_though_its_client_does_not_read(monkeypatch, then):
    """Which would otherwise keep it, and what it has not read, for as long as it likes."""
    async with serving(monkeypatch, timeout_keep_alive=60) as (proxy, port, _):
        writer, client = await unread(port, head("/in-all-buffers"))
        await until(lambda: proxy.asked and not proxy.streaming)
        assert (proxy.left, state_of(client)) == (0, ESTABLISHED)
        writer.write(then)
        await until(lambda: state_of(client) != ESTABLISHED)
        writer.transport.abort()


async def test_a_client_that_has_read_everything_is_not_cut_off(monkeypatch):
    async with serving(monkeypatch, timeout_keep_alive=1) as (_, port, _):
        reader, writer = await connect(port)
        writer.write(head())
        answer = await reader.read(), await reader.read()
        assert b"200 OK" in answer[0], "then the end, and no reset"
        writer.close()
