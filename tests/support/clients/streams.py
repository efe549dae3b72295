"""Single long streams of a deployment, and how each of them ends."""

from __future__ import annotations

import asyncio
import json

import httpx
from waiting import seconds_until

WHOLE = ["[DONE]"]
"""How a stream ends that is whole."""


def client(url, key="none", wait_s=120.0):
    """Of a deployment, for any number of requests at a time."""
    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"},
        timeout=wait_s,
        limits=httpx.Limits(max_connections=None),
    )


async def lines(answer):
    """The lines of an event stream; httpx would end them within a text as well, as Unicode does."""
    begun = ""
    async for piece in answer.aiter_text():
        *whole, begun = (begun + piece).split("\n")
        for line in whole:
            yield line


async def stream(http, max_tokens, begun):
    """The tokens of one answer, and what it ends with; `begun` is called with the first of them."""
    body = {"model": "tiny", "prompt": [1] * 64, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    tokens, ends = 0, []
    async with http.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as answer:
        async for line in lines(answer):
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ends.append(data)
            elif line.startswith("data: "):
                event = json.loads(data)
                ends += ["error"] if "error" in event else []
                for choice in event.get("choices", ()):
                    begun()
                    tokens += len(choice["token_ids"] or ())
    return tokens, ends


async def begun_streams(http, count, max_tokens, within_s=30):
    """The tasks of so many streams, once each of them has begun."""
    begun = set()
    calls = [asyncio.create_task(stream(http, max_tokens, lambda n=n: begun.add(n))) for n in range(count)]

    async def all_stream():
        return len(begun) == count

    await seconds_until(all_stream, within_s, "not every answer has begun")
    return calls
