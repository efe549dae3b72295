"""The limits as a whole: beside others, with hundreds of clients, over TLS, by default."""

import asyncio
import time

import httpx
import pytest
from certificates import self_signed
from limited_proxy import EVENT, PATCHED, closed_after_s, connect, head, post, serving
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.config import ConfigError
from deployments.config.limits import LimitsConfig
from deployments.config.tls import TLSConfig
from deployments.http.proxy import LIMITS_VARIABLE, ConnectionLimits, middlewares


async def test_others_are_served(served):
    _, port, _ = served
    answer = await post(port)
    assert (answer.status_code, answer.content) == (200, EVENT)


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


@pytest.fixture
def unbound():
    """What `middlewares` changes of uvicorn's is as it was afterwards."""
    kept = {name: getattr(HttpToolsProtocol, name) for name in PATCHED}
    yield
    for name, method in kept.items():
        setattr(HttpToolsProtocol, name, method)


@pytest.mark.parametrize("given", [None, "", " ", "{}"])
@pytest.mark.usefixtures("unbound")
def test_a_proxy_without_word_of_limits_has_the_defaults(monkeypatch, given):
    monkeypatch.delenv(LIMITS_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(LIMITS_VARIABLE, given)
    *_, middleware = middlewares()
    assert middleware.cls is ConnectionLimits
    assert middleware.kwargs["limits"] == LimitsConfig()


@pytest.mark.usefixtures("unbound")
def test_a_proxy_has_the_limits_that_its_environment_says(monkeypatch):
    limits = LimitsConfig(max_body_bytes=8388608, allowed_origins=("https://chat.example",))
    for given in (
        '{"max_body_bytes": 8388608,\n\t"allowed_origins": ["https:\\/\\/chat.example"]}',
        limits.model_dump_json(),
    ):
        monkeypatch.setenv(LIMITS_VARIABLE, given)
        *_, middleware = middlewares()
        assert middleware.kwargs["limits"] == limits


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{max_body_bytes: 8388608}", "JSON"),
        ('{"max_body_bytes": 8388608', "JSON"),
        ('{"max_body_mb": 1}', "unknown key 'max_body_mb'; did you mean 'max_body_bytes'"),
        ('{"max_body_bytes": 8388608, "max_body_bytes": 99999999}', "'max_body_bytes' is given twice"),
        ('{"body_timeout_s": "x"}', "body_timeout_s: .*'x'"),
        ("[]", "dictionary|mapping|object"),
    ],
)
@pytest.mark.usefixtures("unbound")
def test_limits_that_are_none_are_refused_with_the_variable_and_the_key(monkeypatch, given, why):
    monkeypatch.setenv(LIMITS_VARIABLE, given)
    with pytest.raises(ConfigError, match=f"{LIMITS_VARIABLE}: .*({why})"):
        middlewares()
