"""Open-loop load: every request is sent when it arrives, whatever is still outstanding.

Owns the sending and the prompts. A closed loop would wait for a slow server and so ask less of it; here a
queue builds up as it does with real clients. How late the client itself was is part of the result.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from deployments.bench import BenchError
from deployments.bench.answer import Answer, Ended, Offered
from simulator.workload.arrivals import Arrival

_LEAD_S: Final = 0.05
"""Between the start and the first arrival, so that the first body is made in time."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random token ids, so that nothing comes from a prefix cache but what the requests of a trace share.

    Every run has a salt of its own: the same arrivals, offered again, get other tokens. Within a run equal
    block hashes give equal tokens.

    Attributes:
        vocabulary: Token ids to draw from; leave out the model's special tokens.
        salt: Makes the tokens of this run.
    """

    vocabulary: range
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def of(self, arrival: Arrival) -> list[int]:
        """Token ids of a request, `arrival.tokens` of them."""
        prompt: list[int] = []
        for block in arrival.blocks:
            if len(prompt) >= arrival.tokens:
                break
            prompt += self._draw(f"block {block}", arrival.block_tokens)
        rest = arrival.tokens - len(prompt)
        if rest > 0:
            prompt += self._draw(f"request {arrival.number}", rest)
        return prompt[: arrival.tokens]

    def _draw(self, of: str, count: int) -> list[int]:
        rng = random.Random(f"{self.salt} {of}")  # noqa: S311 - a workload, not a secret
        return rng.choices(self.vocabulary, k=count)


@dataclass(frozen=True, slots=True)
class Asking:
    """What every request of a run has in common.

    Attributes:
        slo_headers: Send tier and objective as headers.
        body: Further fields of the body.
    """

    model: str
    prompts: Prompts
    slo_headers: bool = True
    body: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})

    def headers(self, arrival: Arrival) -> dict[str, str]:
        """The headers of a request."""
        if not self.slo_headers:
            return {}
        headers: dict[str, str] = {"x-slo-tier": arrival.tier}
        if arrival.ttft_s is not None:
            headers["x-slo-ttft-ms"] = f"{arrival.ttft_s * 1e3:.3f}"
        return headers

    def fields(self, arrival: Arrival) -> dict[str, Any]:
        """The body of a request."""
        return {
            "model": self.model,
            "prompt": self.prompts.of(arrival),
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }


class Completing(Protocol):
    """What requests are offered to."""

    async def complete(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a streaming completion and read it to its end. Never raises for what the server does.

        Raises:
            BenchError: when the client itself cannot go on.
        """
        ...


async def offer(
    server: Completing,
    arrivals: Sequence[Arrival],
    asking: Asking,
    on_ended: Callable[[Ended], None] = lambda _: None,
    *,
    max_missed: float = math.inf,
) -> Offered:
    """Send all `arrivals`, which are in order, at their times, and wait for the last answer.

    `on_ended` is called with each request that is over. Once more than `max_missed` have missed their
    objectives, no more are sent.

    Raises:
        BenchError: as `server.complete`; the requests under way are given up.
    """
    start_s = time.perf_counter() + _LEAD_S
    missed = 0

    async def send(arrival: Arrival, body: bytes) -> Ended:
        nonlocal missed
        answer = await server.complete(body, asking.headers(arrival))
        ended = Ended(arrival, answer, answer.sent_s - start_s - arrival.at_s)
        missed += not ended.is_met
        on_ended(ended)
        return ended

    try:
        async with asyncio.TaskGroup() as group:
            sending = []
            for arrival in arrivals:
                body = msgspec.json.encode(asking.fields(arrival))  # in the gap before its arrival, not after
                await asyncio.sleep(start_s + arrival.at_s - time.perf_counter())
                if missed > max_missed:
                    break
                sending.append(group.create_task(send(arrival, body)))
    except ExceptionGroup as errors:
        raise next((each for each in errors.exceptions if isinstance(each, BenchError)), errors) from None
    unsent = len(arrivals) - len(sending)
    return Offered([task.result() for task in sending], time.perf_counter() - start_s, unsent)
