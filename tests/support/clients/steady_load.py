"""Clients that keep asking while parts of a deployment fail, and what each of them got."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import httpx
from streams import client, lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WAIT_S = 60.0
"""No client waits for longer."""
TIERS = ("premium", "standard", "background")
LENGTHS = (64, 600, 1800)
PROMPTS = 24
"""Prompts are asked again and again, each time under another salt, so that none is ever in a cache."""
MOST_TOKENS = 32
_END = "[DONE]"


def prompt(number: int) -> list[int]:
    """Token ids of one of the prompts."""
    return random.Random(number).choices(range(200), k=LENGTHS[number % len(LENGTHS)])


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        placed: Whether the router has placed it.
        error: Why its answer is not whole, or wrong; None when it is neither.
    """

    started_s: float
    ended_s: float
    first_token_s: float | None
    is_streaming: bool
    placed: bool
    error: str | None


@dataclass
class _Answer:
    """What has come of an answer so far."""

    token_ids: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    placed: bool = False
    ends: int = 0
    finishes: list[str] = field(default_factory=list)

    def take(self, choice: Mapping) -> None:
        self.first_token_s = self.first_token_s or time.monotonic()
        self.token_ids += choice["token_ids"] or ()
        if choice["finish_reason"] is not None:
            self.finishes.append(choice["finish_reason"])

    def error(self, expected: list[int], *, is_streaming: bool) -> str | None:
        """What is wrong with it, if that was all."""
        if is_streaming and self.ends != 1:
            return f"a stream with {self.ends} ends"
        if self.finishes != ["length"]:
            return f"{len(self.token_ids)} of {len(expected)} tokens, which end with {self.finishes}"
        if self.token_ids != expected:
            pairs = zip(self.token_ids, expected, strict=False)
            same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            return f"wrong: {len(self.token_ids)} tokens for {len(expected)}, the first {same} equal"
        return None


class SteadyLoad:
    """Clients of a deployment, each with one request after the other; every second one streams.

    Args:
        url: Of the deployment.
        key: Its API key.
        expected: By number of the prompt, its greedy answer when nothing fails; None takes any answer.
        clients: How many.
    """

    def __init__(
        self, url: str, key: str, expected: Mapping[int, list[int]] | None = None, clients: int = 16
    ) -> None:
        self.asked: list[Asked] = []
        self._expected = expected
        self._clients = clients
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._is_over = False
        self._http = client(url, key, WAIT_S)

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()
        await self._http.aclose()

    async def finish(self) -> None:
        """Ask nothing more, and wait for all answers."""
        self._is_over = True
        self._may_ask.set()
        await asyncio.gather(*self._tasks)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ask nothing meanwhile."""
        self._may_ask.clear()
        yield
        self._may_ask.set()

    def since(self, started_s: float) -> list[Asked]:
        """What ended since then."""
        return [one for one in self.asked if one.ended_s >= started_s]

    def slowest_s(self, since_s: float = 0.0, until_s: float = float("inf")) -> float:
        """The longest time to a first token among requests that began in that time."""
        waits = [
            one.first_token_s - one.started_s
            for one in self.asked
            if since_s <= one.started_s < until_s and one.first_token_s is not None
        ]
        return max(waits, default=0.0)

    async def until_answered(self, after_s: float, *, placed: bool = False, within_s: float = 60) -> float:
        """Seconds from `after_s` to the end of the first answer to a request that began after it.

        Args:
            after_s: On the monotonic clock.
            placed: Count only answers to requests that the router has placed.
            within_s: Longest wait.
        """
        while True:
            for one in self.since(after_s):
                if one.started_s >= after_s and one.error is None and (one.placed or not placed):
                    return one.ended_s - after_s
            assert time.monotonic() - after_s < within_s, f"nobody was answered within {within_s} s"
            await asyncio.sleep(0.02)

    async def _ask_on(self, client: int) -> None:
        rng = random.Random(client)
        while True:
            await self._may_ask.wait()
            if self._is_over:
                return
            tokens = rng.choice((1, 8, MOST_TOKENS))
            self.asked.append(
                await self._ask(
                    rng.randrange(PROMPTS), tokens, rng.choice(TIERS), is_streaming=client % 2 == 0
                )
            )

    async def _ask(self, number: int, tokens: int, tier: str, *, is_streaming: bool) -> Asked:
        started_s = time.monotonic()
        answer, error = _Answer(), None
        try:
            await _read(answer, self._http, number, tokens, tier, is_streaming=is_streaming)
        except (httpx.HTTPError, RefusedError) as failed:
            error = f"{type(failed).__name__} {failed}"[:300]
        else:
            expected = answer.token_ids if self._expected is None else self._expected[number][:tokens]
            error = answer.error(expected, is_streaming=is_streaming)
        ended_s = time.monotonic()
        return Asked(started_s, ended_s, answer.first_token_s, is_streaming, answer.placed, error)


class RefusedError(Exception):
    """The server answers with an error."""


async def reference(url: str, key: str) -> dict[int, list[int]]:
    """What a deployment answers each prompt with when nothing fails, by number."""
    at_once = asyncio.Semaphore(4)

    async def ask(number: int) -> tuple[int, list[int]]:
        answer = _Answer()
        async with at_once:
            await _read(answer, http, number, MOST_TOKENS, "premium", is_streaming=False)
        assert len(answer.token_ids) == MOST_TOKENS
        return number, answer.token_ids

    async with client(url, key, WAIT_S) as http:
        return dict(await asyncio.gather(*map(ask, range(PROMPTS))))


async def _read(
    answer: _Answer, http: httpx.AsyncClient, number: int, tokens: int, tier: str, *, is_streaming: bool
) -> None:
    """Ask for a prompt's answer, and put what comes into `answer`."""
    body = {
        "model": "tiny",
        "prompt": prompt(number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_streaming,
        "return_token_ids": True,
        "cache_salt": random.randbytes(8).hex(),
    }
    headers = {"x-slo-tier": tier}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        answer.placed = "x-slo-predicted-ttft-ms" in response.headers
        if response.status_code != httpx.codes.OK:
            raise RefusedError(f"{response.status_code} {(await response.aread()).decode()}")
        if not is_streaming:
            for choice in json.loads(await response.aread())["choices"]:
                answer.take(choice)
            return
        async for line in lines(response):
            _take_line(line, answer)


def _take_line(line: str, answer: _Answer) -> None:
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == _END:
        answer.ends += 1
        return
    event = json.loads(data)
    if "error" in event:
        raise RefusedError(f"in the stream: {event['error']}")
    for choice in event["choices"]:
        answer.take(choice)
