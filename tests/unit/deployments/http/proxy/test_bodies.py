"""Bodies that do not end or are too large, and who hears of them."""

import time

import httpx
import pytest
from limited_proxy import LIMITS, PATIENT, connect, head, serving
from waiting import until


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
async def test_a_body_that_is_too_large_is_refused_before_it_is_here(monkeypatch, announced):
    most = 0

    async def body(app):
        nonlocal most
        for _ in range(400):
            most = max(most, app._in_flight_bytes)
            yield b"x" * 10_000

    headers = {"content-length": "4000000"} if announced else {}
    started_s = time.monotonic()
    async with serving(monkeypatch, PATIENT) as (_, port, app), httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", content=body(app), headers=headers)
        assert time.monotonic() - started_s < PATIENT.body_timeout_s / 2
        assert answer.status_code == 413
        assert "limits.max_body_bytes" in answer.text
        assert answer.headers["x-request-id"]
        assert most <= 100_000 + 2 * 65_536, "a piece is at most what uvicorn reads at once"
        assert app._in_flight_bytes == 0


async def test_it_is_told_in_the_words_of_the_api_that_was_asked(served):
    _, port, _ = served
    for path in ("/v1/messages", "/v1/completions"):
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"http://127.0.0.1:{port}{path}", content=b"x" * 200_000)
        assert answer.status_code == 413
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")


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
    await until(lambda: app._in_flight_bytes)
    assert not proxy.asked
    writer.write(b"def")
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    _, other = await connect(port)
    other.write(head(length=6) + b"abc")
    await until(lambda: app._in_flight_bytes)
    other.close()
    await until(lambda: not app._in_flight_bytes)
    assert proxy.asked == 1, "one whose client has left meanwhile never goes on"
    writer.close()
