"""An exchange with an application in the process: the answer as it comes, its end, a client that goes."""

import asyncio
from contextlib import aclosing

import grpc
import pytest
from fastapi import FastAPI, Request
from grpc_context import Context
from starlette.responses import JSONResponse, StreamingResponse

from deployments.grpc.exchange import Events, Head, SlowReaderError, exchange, refuse, tell

PIECES, PIECE = 200, b"x" * 10_000
HUGE = b"x" * (8 * 2**20)


def application():
    app = FastAPI()
    app.left, app.made = asyncio.Event(), 0

    @app.post("/echo")
    async def echo(request: Request):
        return JSONResponse(
            {"body": (await request.body()).decode(), "key": request.headers["x-key"]},
            headers={"x-slo-tier": "premium"},
        )

    @app.get("/stream")
    async def stream():
        async def events():
            try:
                for number in range(1000):
                    yield f'data: {{"n": {number}}}\n\n'
                    await asyncio.sleep(0.001)
            finally:
                app.left.set()

        return StreamingResponse(events())

    @app.get("/large")
    async def large():
        async def events():
            try:
                for _ in range(PIECES):
                    app.made += 1
                    yield PIECE
                    await asyncio.sleep(0)  # as what generates
            finally:
                app.left.set()

        return StreamingResponse(events())

    @app.get("/breaks")
    async def breaks():
        async def events():
            yield "data: {}\n\n"
            raise RuntimeError("in the middle")

        return StreamingResponse(events())

    return app


async def hello():
    return b"hello"


async def test_a_request_and_its_answer():
    pieces = exchange(application(), "POST", "/echo", [(b"x-key", b"k")], hello)
    head, body = [piece async for piece in pieces]
    assert isinstance(head, Head)
    assert head.is_ok
    assert head.headers["x-slo-tier"] == "premium"
    assert body == b'{"body":"hello","key":"k"}'


async def test_no_route_is_an_answer_too():
    head, _ = [piece async for piece in exchange(application(), "GET", "/nowhere", [])]
    assert (head.status, head.is_ok) == (404, False)


async def test_closing_an_exchange_is_a_client_that_goes():
    app = application()
    async with aclosing(exchange(app, "GET", "/stream", [])) as pieces:
        assert (await anext(pieces)).is_ok
        assert Events().read(await anext(pieces))[0] == {"n": 0}
    assert app.left.is_set()


async def test_cancelling_the_one_who_waits_is_a_client_that_goes():
    app = application()

    async def read():
        async with aclosing(exchange(app, "GET", "/stream", [])) as pieces:
            async for _ in pieces:
                pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert app.left.is_set()


async def test_a_slow_reader_gets_what_has_come_at_once():
    async with aclosing(exchange(application(), "GET", "/stream", [])) as pieces:
        await anext(pieces)
        await anext(pieces)
        await asyncio.sleep(0.1)
        assert len(Events().read(await anext(pieces))) > 5


async def test_an_application_gets_no_further_ahead_of_its_reader_than_so_much():
    app = application()
    async with aclosing(exchange(app, "GET", "/large", [], write_timeout_s=5.0)) as pieces:
        await anext(pieces)
        size = len(await anext(pieces))
        await asyncio.sleep(0.05)
        assert app.made * len(PIECE) - size <= 64 * 1024 + 2 * len(PIECE)
        assert not app.left.is_set()
        async for piece in pieces:  # who reads on has all of it
            size += len(piece)
    assert size == PIECES * len(PIECE)


async def test_a_reader_that_reads_nothing_for_too_long_is_a_client_that_goes():
    app = application()
    async with aclosing(exchange(app, "GET", "/large", [], write_timeout_s=0.1)) as pieces:
        await anext(pieces)
        await anext(pieces)
        async with asyncio.timeout(5):
            await app.left.wait()
        assert app.made < 20
        with pytest.raises(SlowReaderError):
            [piece async for piece in pieces]


async def test_a_huge_piece_may_take_its_reader_longer_than_a_small_one():
    """By a tenth of a second for each MiB here."""

    async def huge(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (HUGE, *[PIECE] * PIECES):
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async with aclosing(exchange(huge, "GET", "/", [], write_timeout_s=0.1)) as pieces:
        await anext(pieces)
        sizes = [len(await anext(pieces))]
        await asyncio.sleep(0.4)
        sizes += [len(piece) async for piece in pieces]
    assert sizes[0] >= len(HUGE)
    assert sum(sizes) == len(HUGE) + PIECES * len(PIECE)


async def test_an_application_that_breaks_breaks_the_exchange():
    with pytest.raises(RuntimeError, match="in the middle"):
        [piece async for piece in exchange(application(), "GET", "/breaks", [])]


def test_events_may_end_anywhere():
    events = Events()
    whole = b'data: {"a": 1}\n\n: keep-alive\n\ndata: {"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
    found = [event for byte in whole for event in events.read(bytes([byte]))]
    assert found == [{"a": 1}, {"b": "é"}]
    assert events.is_complete
    cut = Events()
    cut.read(whole[:20])
    assert not cut.is_complete


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (413, "RESOURCE_EXHAUSTED"),
        (415, "INVALID_ARGUMENT"),
        (431, "RESOURCE_EXHAUSTED"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (503, "UNAVAILABLE"),
        (418, "INTERNAL"),
    ],
)
def test_status_and_trailers(status, code):
    context = Context()
    tell(context, Head(status, {"retry-after": "7", "x-slo-tier": "premium", "content-type": "x"}), "mine")
    error = {"message": "why", "type": "t", "code": "c", "param": None}
    refuse(context, error, status)
    assert (context.code, context.details) == (grpc.StatusCode[code], "why")
    assert context.trailers == [
        ("request_id", "r"),
        ("retry-after", "7"),
        ("x-slo-tier", "premium"),
        ("x-request-id", "mine"),
        ("error-code", "c"),
        ("error-type", "t"),
    ]


def test_an_error_of_a_request_that_is_traced_tells_the_trace():
    context = Context()
    error = {"message": "why", "type": "t", "code": "c", "param": None, "trace_id": "4bf9"}
    refuse(context, error, 503)
    assert ("error-trace-id", "4bf9") in context.trailers


def test_a_message_is_as_long_as_trailers_may_be():
    context = Context()
    refuse(context, {"message": "ab" + "é" * 20_000, "type": "t", "code": "c", "param": None}, 404)
    assert context.code is grpc.StatusCode.NOT_FOUND
    assert context.details == "ab" + "é" * 749


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("service_unavailable", "UNAVAILABLE"),
        ("overloaded_error", "RESOURCE_EXHAUSTED"),
        ("rate_limit_error", "RESOURCE_EXHAUSTED"),
        ("invalid_request_error", "INVALID_ARGUMENT"),
        ("server_error", "INTERNAL"),
    ],
)
def test_an_error_in_the_middle_has_the_code_of_its_type(kind, code):
    context = Context()
    refuse(context, {"message": "why", "type": kind, "code": "c", "param": "p"})
    assert context.code is grpc.StatusCode[code]
