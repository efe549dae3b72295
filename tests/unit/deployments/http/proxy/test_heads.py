"""Heads that are slow, endless, too large or no text, and those that pass."""

import asyncio
import time

import httpx
import pytest
from limited_proxy import CHUNKED, PATIENT, closed_after_s, connect, head, post, serving


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


@pytest.mark.parametrize("is_cut", [False, True])
async def test_what_comes_behind_a_body_is_no_header_however_it_comes(served, is_cut):
    proxy, port, _ = served
    reader, writer = await connect(port)
    begins = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(begins + b"2\r\n{}\r\n")
    if is_cut:
        await asyncio.sleep(0.1)
    writer.write(b"0\r\nx-slo-tier: premium\r\nauthorization: Bearer k\r\nx-request-id: \xff\r\n\r\n")
    answer = await reader.read()
    assert b" 200 " in answer
    assert proxy.headers.keys().isdisjoint({b"x-slo-tier", b"authorization"})
    assert proxy.headers.get(b"x-request-id") != b"\xff"
    writer.close()
