"""All bodies together that nobody has taken yet are bounded."""

import asyncio
import pickle
import time

import pytest
from limited_proxy import LIMITS, PATIENT, connect, head, post, serving
from ray.serve._private.http_util import MessageQueue
from ray.serve._private.proxy import HTTPProxy
from starlette.requests import Request
from waiting import until

from deployments.http.door import EndsWithItsClient
from deployments.http.gatekeeper import Gatekeeper
from deployments.http.proxy import ConnectionLimits
from slo.admission.tenants import KeyRing


async def test_all_bodies_together_are_bounded_that_nobody_has_taken(served):
    proxy, port, app = served
    proxy.may_read.clear()
    waiting = [asyncio.create_task(post(port, b"x" * 80_000)) for _ in range(3)]
    await until(lambda: app._in_flight_bytes >= 240_000)
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
    await until(lambda: proxy.asked >= 6 and not app._in_flight_bytes)
    another = asyncio.create_task(post(port, b"x" * 80_000))
    await until(lambda: proxy.asked >= 7)
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
    assert [message["more_body"] for message in fetched] == [True, False]
    assert app._in_flight_bytes == 0
    assert not serving.done(), "it is being answered"
    connection.put_nowait({"type": "http.disconnect"})
    await serving


async def test_a_body_is_handed_on_as_one_however_small_its_pieces_were():
    """Whoever takes them does so at once, and would hold the loop for as long as there are many."""
    taken = []

    async def takes(scope, receive, send):
        taken.extend([await receive(), await receive()])
        assert app._in_flight_bytes == 5000
        assert b"".join(sent) == taken[0]["body"]
        assert taken[1] == {"type": "http.request", "body": b"", "more_body": False}
        taken.clear()
        assert app._in_flight_bytes == 0
        taken.append(await receive())

    connection, sent = asyncio.Queue(), [bytes([number % 256]) for number in range(5000)]
    for number, piece in enumerate(sent):
        connection.put_nowait({"type": "http.request", "body": piece, "more_body": number < 4999})
    connection.put_nowait({"type": "http.disconnect"})
    app = ConnectionLimits(takes, LIMITS)
    await app({"type": "http", "headers": [], "path": "/"}, connection.get, None)
    assert taken == [{"type": "http.disconnect"}]


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_nothing_is_held_of_a_body_that_does_not_become_whole(is_cancelled):
    connection = asyncio.Queue()
    for _ in range(3):
        connection.put_nowait({"type": "http.request", "body": b"x" * 20_000, "more_body": True})
    app = ConnectionLimits(None, LIMITS)
    arriving = asyncio.create_task(app({"type": "http", "headers": [], "path": "/"}, connection.get, None))
    await until(lambda: app._in_flight_bytes >= 60_000)
    if is_cancelled:
        arriving.cancel()
    else:
        connection.put_nowait({"type": "http.disconnect"})
    await asyncio.wait([arriving])
    assert app._in_flight_bytes == 0
    assert not app._arriving


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
    await until(lambda: taken or answering.done())
    assert taken == [60_000]
    assert app._in_flight_bytes == 0
    connection.put_nowait({"type": "http.disconnect"})
    await answering


async def test_what_is_given_up_while_its_time_runs_out_breaks_nobody_else():
    """The loop has been busy: who has sent too slowly and another's bytes have their turns at once."""
    answered = []

    async def answers(scope, receive, send):
        answered.append((await receive())["body"])

    class Client:
        """As a uvicorn cycle, and its transport."""

        transport = property(lambda self: self)

        def get_protocol(self):
            return None

        def is_closing(self):
            return False

        async def send(self, message):
            pass

    loop, app = asyncio.get_running_loop(), ConnectionLimits(answers, LIMITS)
    scope = {"type": "http", "method": "POST", "headers": [], "path": "/"}
    size = LIMITS.max_bytes_in_flight // 4
    slow = [asyncio.Queue() for _ in range(3)]
    for queue in slow:
        queue.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": True})
    tasks = [loop.create_task(app(scope, queue.get, Client().send)) for queue in slow]
    await asyncio.sleep(0.1)
    other, whole = asyncio.Queue(), {"type": "http.request", "body": b"y" * (size + 4), "more_body": False}
    tasks.append(loop.create_task(app(scope, other.get, Client().send)))
    due_s = next(iter(app._arriving))._until.when()
    loop.call_at(due_s - 0.02, time.sleep, 0.03)
    loop.call_at(due_s - 0.01, other.put_nowait, whole)
    await asyncio.gather(*tasks)
    assert answered == [whole["body"]]
    assert app._in_flight_bytes == 0


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
            await until(lambda held=held: app._in_flight_bytes >= held)
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
