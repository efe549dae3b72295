"""What a client is told of an image that vLLM cannot fetch, with vLLM's own client and a host that fails."""

import asyncio

import pytest
from aiohttp import web
from ray.serve.llm.openai_api_models import ChatCompletionRequest
from vllm.connections import HTTPConnection
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.multimodal.media import MediaConnector

from decode_node import rendering


class Fetching:
    """vLLM's OpenAI layer, as far as it fetches the image of a chat."""

    create_error_response = staticmethod(create_error_response)

    def __init__(self):
        self._oai_serving_chat = self

    async def render_chat_request(self, request):
        connection = HTTPConnection()
        try:
            for part in request.messages[0]["content"][1:]:
                await MediaConnector(connection=connection).fetch_image_async(part["image_url"]["url"])
        finally:
            await (await connection.get_async_client()).close()


@pytest.fixture
async def host(monkeypatch):
    """Where a host listens that answers each path otherwise, none with an image."""
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "1")

    async def answer(request):
        match request.path:
            case "/slow":
                await asyncio.sleep(2)
            case "/gone":
                request.transport.close()
        return web.Response(status=int(request.path[1:]) if request.path[1:].isdigit() else 200)

    app = web.Application()
    app.router.add_get("/{path}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def chat(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": content}])


async def refused(request):
    return (await rendering.render(Fetching(), request, is_chat=True, max_model_len=64)).error


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://{host}/404", "HTTP 404"),
        ("http://{host}/410", "HTTP 410"),
        ("http://{host}/429", "HTTP 429"),
        ("http://{host}/503", "HTTP 503"),
        ("http://{host}/slow", "did not answer in time"),
        ("http://{host}/gone", "broke off"),
        ("https://{host}/image", "TLS"),
        ("http://127.0.0.1:1/image", "takes no connection"),
    ],
)
async def test_an_image_that_cannot_be_fetched_is_the_requests_error_on_whichever_replica(host, url, why):
    """A status from 500 on would have other replicas try it too, and 408, 409 or 429 the client."""
    error = await refused(chat(url.format(host=host)))
    assert (error.code, error.param) == (rendering.BAD_REQUEST, "messages")
    assert "127.0.0.1" in error.message
    assert why in error.message


async def test_a_host_whose_name_is_not_known_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    error = await refused(chat("http://nowhere.invalid/image", "data:image/png;base64,AAAA"))
    assert (error.code, error.param) == (rendering.BAD_REQUEST, "messages")
    assert "from nowhere.invalid: its name was not found" in error.message


async def test_what_takes_too_long_and_fetches_nothing_is_no_error_of_the_request():
    class Slow(Fetching):
        async def render_chat_request(self, request):
            raise TimeoutError

    with pytest.raises(TimeoutError):
        await rendering.render(Slow(), chat("data:image/png;base64,AAAA"), is_chat=True, max_model_len=64)
