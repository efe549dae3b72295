"""Clients whose answers take a while, and what each of them got, piece by piece."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field

import httpx
from streams import lines

ASCII = list(range(94))
"""Tokens of the tiny models that are characters by themselves."""


@dataclass
class LongAnswer:
    """What has come of an answer.

    Attributes:
        created: The times of its beginning that its events name.
        ends: What it ended with: reasons to finish, `[DONE]`, errors.
        gap_s: The longest wait between two events.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    created: set[int] = field(default_factory=set)
    usage: dict | None = None
    ends: list[str] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    gap_s: float = 0.0
    _last_s: float | None = None

    @property
    def content(self):
        """All that must be the same whatever fails meanwhile."""
        return self.text, self.token_ids, self.roles, self.usage, self.ends

    def take(self, event):
        now_s = time.monotonic()
        if self._last_s is not None:
            self.gap_s = max(self.gap_s, now_s - self._last_s)
        self._last_s = now_s
        if "error" in event:
            self.ends.append(event["error"]["code"])
            return
        self.created.add(event["created"])
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.first_s = self.first_s or now_s
            said = choice.get("delta") or choice.get("message") or {}
            self.text += choice.get("text") or said.get("content") or ""
            self.roles += [said["role"]] if said.get("role") else []
            self.token_ids += choice.get("token_ids") or ()
            given = choice.get("logprobs") or {}
            self.logprobs += given.get("token_logprobs") or ()
            if choice["finish_reason"] is not None:
                self.ends.append(choice["finish_reason"])


def body(number: int, tokens: int) -> tuple[str, dict]:
    """The path and body of one request: chat or completion, streaming or not, sampled in several ways."""
    rng = random.Random(number)
    asked = {
        "model": "tiny",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": number % 2 == 0,
        "return_token_ids": True,
    }
    if asked["stream"]:
        asked["stream_options"] = {"include_usage": True}
    if number % 8 in {2, 3}:
        text = " ".join(str(rng.randrange(1000)) for _ in range(100))
        return "chat/completions", asked | {"messages": [{"role": "user", "content": text}]}
    asked["prompt"] = rng.choices(range(200), k=rng.choice((64, 500, 1500)))
    lively = {"allowed_token_ids": ASCII, "repetition_penalty": 1.3}
    more = {
        0: lively | {"stop": ["never said at all"]},
        1: lively,
        4: {"logprobs": 2},
        6: {"temperature": 1.0, "seed": number},
    }
    return "completions", asked | more.get(number % 8, {})


async def ask(
    http: httpx.AsyncClient, number: int, tokens: int, answer: LongAnswer, **more: object
) -> LongAnswer:
    """Ask, and put what comes into `answer`."""
    path, asked = body(number, tokens)
    asked |= {"cache_salt": random.randbytes(8).hex(), **more}
    async with http.stream("POST", f"/v1/{path}", json=asked) as response:
        if not asked["stream"] or response.status_code != httpx.codes.OK:
            answer.take(json.loads(await response.aread()))
            return answer
        async for line in lines(response):
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                answer.ends.append(data)
            elif line.startswith("data: "):
                answer.take(json.loads(data))
    return answer
