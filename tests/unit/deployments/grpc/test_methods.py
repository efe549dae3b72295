"""The methods of the ingress over a scripted application: health, failures, streams that break off."""

import asyncio

import grpc
import pytest
from fastapi import FastAPI, Request
from grpc_context import Context
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from starlette.responses import JSONResponse, StreamingResponse

from deployments.config.limits import LimitsConfig
from deployments.grpc import inference_pb2 as pb
from deployments.grpc.health import WatchedHealth
from deployments.grpc.methods import InferenceIngress

UNAVAILABLE = '{"error": {"message": "m", "type": "service_unavailable", "code": "c", "param": null}}'


@pytest.fixture
def ingress():
    class Scripted(InferenceIngress):
        def __init__(self):
            self.ready, self.looks, self.events = True, 0, []
            self._limits = LimitsConfig(write_timeout_s=0.1)
            self._watched = WatchedHealth(self._health, 0.02, 0.3)
            self.app = FastAPI()

            @self.app.get("/ready")
            async def ready():
                self.looks += 1
                return JSONResponse({}, 200 if self.ready else 503)

            @self.app.post("/v1/completions")
            async def completions(request: Request):
                self.said = request.headers.getlist("content-type")

                async def stream():
                    for event in self.events:
                        if isinstance(event, Exception):
                            raise event
                        yield f"data: {event}\n\n"

                return StreamingResponse(stream(), media_type="text/event-stream")

    return Scripted()


async def streamed(ingress, *events):
    ingress.events = events
    context = Context()
    answers = [answer async for answer in ingress.CompleteStream(pb.CompleteRequest(), context)]
    return answers, context


async def test_the_body_that_is_made_of_a_message_is_said_to_be_json(ingress):
    await streamed(ingress, "[DONE]")
    assert ingress.said == ["application/json"]


async def test_a_stream_to_its_end(ingress):
    answers, context = await streamed(ingress, '{"choices": [{"text": "a"}]}', "[DONE]")
    assert [chunk.choices[0].text for answer in answers for chunk in answer.chunks] == ["a"]
    assert context.code is None


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (None, "INTERNAL"),
        (RuntimeError("with a path in it"), "INTERNAL"),
        (
            '{"error": {"message": "m", "type": "service_unavailable", "code": "c", "param": null}}',
            "UNAVAILABLE",
        ),
        (
            '{"error": {"message": "m", "type": "overloaded_error", "code": "dropped", "param": null}}',
            "RESOURCE_EXHAUSTED",
        ),
    ],
)
async def test_a_stream_that_does_not_get_there_never_ends_well(ingress, last, code):
    """It ends with an empty answer, as the status travels with answers only."""
    events = ['{"choices": [{"text": "a"}]}', *([last] if last else [])]
    answers, context = await streamed(ingress, *events)
    assert not answers[-1].chunks
    assert sum(len(answer.chunks) for answer in answers) == 1
    assert context.code is grpc.StatusCode[code]
    assert "path" not in context.details


async def test_a_stream_that_is_not_read_ends_as_cancelled(ingress):
    """It would be generated to its end, and kept, for a client that reads nothing and counts no more."""
    text = '{"choices": [{"text": "%s"}]}' % ("a" * 10_000)
    ingress.events, context = [text] * 100, Context()
    answers = ingress.CompleteStream(pb.CompleteRequest(), context)
    read = len((await anext(answers)).chunks)
    await asyncio.sleep(0.3)
    rest = [answer async for answer in answers]
    assert read + sum(len(answer.chunks) for answer in rest) < 20
    assert not rest[-1].chunks
    assert (context.code, "write_timeout_s" in context.details) == (grpc.StatusCode.CANCELLED, True)


async def test_what_cannot_be_understood_is_an_error_without_a_traceback(ingress):
    context = Context()
    ingress.events = ["{"]
    assert await ingress.Complete(pb.CompleteRequest(), context) == pb.CompleteResponse()
    assert context.code is grpc.StatusCode.INTERNAL
    assert context.details == "the server failed to answer; its log has the details under request id r"


async def test_a_route_that_there_is_not_is_an_error(ingress):
    context = Context()
    await ingress.Chat(pb.ChatRequest(), context)
    assert context.code is grpc.StatusCode.INTERNAL


async def test_health_follows_readiness(ingress):
    async def status():
        return (await ingress.Check(HealthCheckRequest(), Context())).status

    assert await status() == HealthCheckResponse.SERVING
    ingress.ready = False
    assert await status() == HealthCheckResponse.NOT_SERVING


async def test_the_name_of_a_service_that_there_is_not_is_not_repeated(ingress):
    """Anybody may ask, in a message of up to 64 MiB, and text takes several times that to be shown."""
    context = Context()
    await ingress.Check(HealthCheckRequest(service="x" * 10_000_000), context)
    assert context.code is grpc.StatusCode.NOT_FOUND
    assert len(context.details) < 300
    assert "slackserve.v1.Inference" in context.details


async def test_a_watcher_is_told_of_changes_for_a_while(ingress):
    seen = []
    async for answer in ingress.Watch(HealthCheckRequest(), Context()):
        seen.append(answer.status)
        ingress.ready = False
    assert seen == [HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING]
    (unknown,) = [answer async for answer in ingress.Watch(HealthCheckRequest(service="x"), Context())]
    assert unknown.status == HealthCheckResponse.SERVICE_UNKNOWN


async def test_all_that_watch_are_told_by_the_same_looks(ingress):
    """Nobody needs a key for it, and a look is a request through the whole application."""

    async def watch():
        return [answer.status async for answer in ingress.Watch(HealthCheckRequest(), Context())]

    assert await asyncio.gather(*[watch() for _ in range(50)]) == [[HealthCheckResponse.SERVING]] * 50
    assert ingress.looks < 50
