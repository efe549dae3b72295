"""The port that the command holds and ingresses answer, over real sockets."""

import asyncio
import contextlib
import json
import logging
import platform
import re
import socket
import uuid

import httpx
import pytest
from limited_proxy import connect, head
from ports import free_port
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from waiting import until

from deployments.config.limits import LimitsConfig
from deployments.http.door import VARIABLE, Door, listener_of, opened

LINUX = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
LIMITS = LimitsConfig(max_body_bytes=2000, write_timeout_s=0.5)
MUCH = 160_000
"""Bytes of an answer that the kernel does not take, and that let no writer wait."""


class Ingress:
    """Answers `/` at once, `/much` with much, streams for `/stream`, and comes to no end for `/long`."""

    def __init__(self, name="one"):
        self.name = name.encode()
        self.cancelled, self.tail_ended = [], 0

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        path = scope["path"]
        try:
            if path == "/long":
                await asyncio.sleep(60)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if path == "/broken":
                raise ValueError("a defect")
            while path == "/stream":
                await send({"type": "http.response.body", "body": b"data", "more_body": True})
                await asyncio.sleep(0.02)
            await send({"type": "http.response.body", "body": b"x" * MUCH if path == "/much" else self.name})
            await asyncio.sleep(0.05)  # accounts are written when the client has its answer
            self.tail_ended += 1
        except asyncio.CancelledError:
            self.cancelled.append(path)
            raise


@pytest.fixture
def held(monkeypatch):
    for name in (
        "connection_made",
        "data_received",
        "on_headers_complete",
        "on_body",
        "timeout_keep_alive_handler",
    ):
        monkeypatch.setattr(HttpToolsProtocol, name, getattr(HttpToolsProtocol, name))
    port = free_port()
    found = Door.at("127.0.0.1", port, {})
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    yield found, f"http://127.0.0.1:{port}"
    found.close()


@contextlib.asynccontextmanager
async def asking(url):
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client


async def at_once():
    """An ingress is in place."""


async def test_before_an_ingress_is_there_connections_are_refused(held):
    _, url = held
    async with asking(url) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/")
        async with opened(Ingress(), LIMITS, at_once):
            assert (await client.get("/")).content == b"one"


async def test_while_an_ingress_is_replaced_connections_wait(held):
    _, url = held
    async with asking(url) as client:
        async with opened(Ingress("old"), LIMITS, at_once):
            assert (await client.get("/")).content == b"old"
        waiting = [asyncio.create_task(client.post("/", content=b"x" * 100)) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        async with opened(Ingress("new"), LIMITS, at_once):
            assert {answer.content for answer in await asyncio.gather(*waiting)} == {b"new"}


async def test_connections_wait_until_the_ingress_is_in_place(held):
    _, url = held
    in_place = asyncio.Event()
    async with asking(url) as client, opened(Ingress(), LIMITS, in_place.wait):
        waiting = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        in_place.set()
        assert (await waiting).content == b"one"


async def test_an_ingress_that_never_comes_into_place_can_end(held):
    async with asyncio.timeout(5), opened(Ingress(), LIMITS, asyncio.Event().wait):
        await asyncio.sleep(0.05)


async def test_an_ingress_without_its_certificate_does_not_start(held, monkeypatch):
    found, _ = held
    given = json.loads(found.environment()[VARIABLE])
    tls = {"ssl_certfile": "/nowhere/a.pem", "ssl_keyfile": "/nowhere/b.pem"}
    monkeypatch.setenv(VARIABLE, json.dumps(given | {"tls": tls}))
    with pytest.raises(FileNotFoundError):
        async with opened(Ingress(), LIMITS, at_once):
            pass


async def test_what_one_ingress_leaves_another_takes(held):
    _, url = held
    async with opened(Ingress("stays"), LIMITS, at_once):
        async with opened(Ingress("goes"), LIMITS, at_once), asking(url) as client:
            assert (await client.get("/")).content in (b"stays", b"goes")
        async with asking(url) as client:
            assert (await client.get("/")).content == b"stays"


@pytest.mark.parametrize("path", ["/long", "/stream"])
async def test_what_a_client_has_left_is_cancelled(held, path):
    _, url = held
    ingress = Ingress()
    async with opened(ingress, LIMITS, at_once):
        async with asking(url) as client:
            asked = asyncio.create_task(client.post(path, content=b"{}"))
            await asyncio.sleep(0.3)
            asked.cancel()
        await until(lambda: ingress.cancelled == [path])


async def test_what_follows_the_answer_is_not_cancelled(held):
    _, url = held
    ingress = Ingress()
    async with opened(ingress, LIMITS, at_once):
        async with asking(url) as client:
            await client.get("/")
        await until(lambda: ingress.tail_ended == 1)
    assert not ingress.cancelled


async def test_a_client_that_does_not_read_does_not_keep_an_ingress_from_ending(held):
    _, url = held
    ingress = Ingress()
    async with asyncio.timeout(5):
        async with opened(ingress, LIMITS, at_once):
            _, writer = await connect(int(url.rpartition(":")[2]))
            writer.transport.pause_reading()
            writer.write(head("/much"))
            await until(lambda: ingress.tail_ended == 1)
        writer.transport.abort()


async def test_a_request_has_its_clients_id_or_one_of_its_own(held):
    _, url = held
    async with asking(url) as client, opened(Ingress(), LIMITS, at_once):
        assert (await client.get("/", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        given = [(await client.get("/")).headers["x-request-id"] for _ in range(2)]
    assert len({uuid.UUID(each) for each in given}) == 2


async def test_an_answer_that_breaks_closes_the_connection_and_is_logged(held, caplog):
    _, url = held
    with caplog.at_level(logging.ERROR):
        async with asking(url) as client, opened(Ingress(), LIMITS, at_once):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("/broken")
            assert (await client.get("/")).status_code == 200
    assert "a defect" in caplog.text


async def test_limits_of_connections_hold(held):
    _, url = held
    async with asking(url) as client, opened(Ingress(), LIMITS, at_once):
        answer = await client.post("/", content=b"x" * 2001)
    assert (answer.status_code, "x-request-id" in answer.headers) == (413, True)


async def test_without_a_door_nothing_is_opened(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = asyncio.all_tasks()
    async with opened(Ingress(), LIMITS, at_once):
        assert asyncio.all_tasks() == before


def test_a_door_that_is_closed_hands_out_nothing(held):
    found, _ = held
    name = json.loads(found.environment()[VARIABLE])["name"]
    listener_of(name).close()
    found.close()
    with pytest.raises(ConnectionRefusedError):
        listener_of(name)


def test_another_user_gets_nothing(held, monkeypatch):
    found, _ = held
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(OSError, match="hands out no socket"):
        listener_of(json.loads(found.environment()[VARIABLE])["name"])


def test_a_port_that_is_taken_is_an_error():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        Door.at("127.0.0.1", taken.getsockname()[1], {})


@pytest.mark.skipif(LINUX < (6, 8), reason="Linux before 6.8 lets both have the port until one listens")
def test_two_that_start_at_once_do_not_both_have_a_port():
    port = free_port()
    first = Door.at("127.0.0.1", port, {})
    try:
        with pytest.raises(OSError, match="in use"):
            Door.at("127.0.0.1", port, {})
    finally:
        first.close()
    Door.at("127.0.0.1", port, {}).close()
