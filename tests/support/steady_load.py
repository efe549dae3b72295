"""A handful of clients that ask all the time, and what became of each of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import openai

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60.0
"""No client waits for longer."""
TIERS = ("premium", "standard", "background")


@dataclass(frozen=True)
class Asked:
    """One request; `error` is None for an answer that is whole."""

    started_s: float
    ended_s: float
    first_token_s: float | None
    placed: bool
    error: str | None


@dataclass
class SteadyLoad:
    """Clients of a deployment, each with one request after the other, streaming and not, of all tiers."""

    url: str
    key: str
    clients: int = 8
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._may_ask = asyncio.Event()
        self._may_ask.set()

    async def __aenter__(self) -> Self:
        self._client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=WAIT_S
        )
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ask nothing meanwhile."""
        self._may_ask.clear()
        yield
        self._may_ask.set()

    def since(self, started_s: float) -> list[Asked]:
        """What ended since then."""
        return [one for one in self.asked if one.ended_s >= started_s]

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

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            await self._may_ask.wait()
            await self._ask(rng, TIERS[rng.randrange(len(TIERS))], is_streaming=rng.random() < 0.6)

    async def _ask(self, rng: random.Random, tier: str, *, is_streaming: bool) -> None:
        started_s = time.monotonic()
        first_token_s, placed, error = None, False, None
        try:
            raw = await self._client.completions.with_raw_response.create(
                model="tiny",
                prompt=rng.choices(range(200), k=rng.choice((64, 1500, 3500))),
                max_tokens=8,
                stream=is_streaming,
                extra_headers={"x-slo-tier": tier},
                extra_body={"ignore_eos": True},
            )
            placed = "x-slo-predicted-ttft-ms" in raw.headers
            answer = raw.parse()
            if is_streaming:
                finish = None
                async for piece in answer:
                    first_token_s = first_token_s or time.monotonic()
                    finish = piece.choices[0].finish_reason if piece.choices else finish
                error = None if finish == "length" else "the stream ended early"
            elif answer.usage.completion_tokens != 8:
                error = f"only {answer.usage.completion_tokens} tokens"
        except openai.APIStatusError as refused:
            error = f"{refused.status_code} {refused.code}"
        except openai.APIError as failed:
            error = f"{type(failed).__name__} {failed}"[:200]
        with contextlib.suppress(asyncio.CancelledError):
            self.asked.append(Asked(started_s, time.monotonic(), first_token_s, placed, error))
