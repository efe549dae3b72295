"""Single long streams of a deployment, and how each of them ends."""

from __future__ import annotations

import json

import httpx

_WAIT_S = 120.0
WHOLE = ["[DONE]"]
"""How a stream ends that is whole."""


def client(fleet):
    """Of a fleet, with its key."""
    return httpx.AsyncClient(
        base_url=fleet.deployment.url,
        headers={"authorization": f"Bearer {fleet.key}"},
        timeout=_WAIT_S,
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
