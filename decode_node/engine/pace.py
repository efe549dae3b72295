"""How a decode engine keeps the pace of its streams.

Asks `slo.decode.composition` whom a step leaves out, and `slo.decode.newcomers` whether the streams bear one
more. Owns who was left out last, and how much of a sequence a step computes beside the streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from slo.decode.composition import MARGIN, Composer, Paced, chunk_within
from slo.decode.newcomers import Newcomers, Starting
from slo.decode.step_time import StepShape, StepTimes

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from decode_node.engine.step_clock import StepClock
    from decode_node.engine.stream_book import StreamBook
    from decode_node.engine.view import StreamView

_NOBODY: Final[frozenset[str]] = frozenset()


class Beside(NamedTuple):
    """What a newcomer would start beside.

    Attributes:
        streams: Those that run, or are going to: their KV is on its way, or they start with the next step.
        prompt_tokens: What the next step computes of prompts, and of sequences that are computed again.
    """

    streams: Sequence[Paced]
    prompt_tokens: int


class Pace:
    """That of one engine's streams.

    Args:
        view: Its requests.
        book: How they stand.
        times: What its steps take.
        clock: When the latest one ended.
        most_tokens: The engine's own bound on the tokens of one sequence in a step.
        in_chunks: Whether a step may compute less of one than that.

    Attributes:
        most_tokens: See Args.
    """

    def __init__(
        self,
        view: StreamView,
        book: StreamBook,
        times: StepTimes,
        clock: StepClock,
        most_tokens: int,
        *,
        in_chunks: bool,
    ) -> None:
        self._view = view
        self._book = book
        self._times = times
        self._clock = clock
        self._composer = Composer(times)
        self._newcomers = Newcomers(times)
        self._left_out = _NOBODY
        self._in_chunks = in_chunks
        self.most_tokens = most_tokens

    def step_s(self) -> float:
        """What a step takes with all that run."""
        running = self._view.running
        context = sum([request.num_computed_tokens for request in running])
        return self._times.predict_s(StepShape(len(running), context))

    def chunk_tokens(self) -> int:
        """Tokens of a sequence that a step computes again: so many that the tightest pace bears it.

        Whoever waits, or has its own prompt computed, has no token in the step.
        """
        paced, accounts = self._book.paced, self._book.accounts
        token_s = self._times.prompt_token_s if self._times.is_known else 0.0
        decoding = [one.request_id for one in self._view.running if paced and not one.is_prefill_chunk]
        objectives = [accounts[name].tpot_s or 0.0 for name in decoding if name in paced]
        if not objectives or not token_s or not self._in_chunks:
            return self.most_tokens
        return chunk_within(min(objectives), token_s, self.most_tokens)

    def beside(self, others: Iterable[Request], now_s: float, known: Beside | None = None) -> Beside:
        """What a newcomer would start beside: these, and those that are `known` already."""
        if not self._book.paced:
            return Beside((), 0)
        streams = [self._view.paced(one, self._clock.ended_s, now_s) for one in others]
        if known is not None:
            return Beside([*known.streams, *streams], known.prompt_tokens)
        return Beside(streams, self._prompt_tokens())

    def admits(
        self, request: Request, beside: Beside, since_s: float, now_s: float, to_come: int = 0
    ) -> bool:
        """Whether the others bear a request, it has waited for long enough, or it loses its own objective.

        Args:
            request: It.
            beside: The others.
            since_s: Since when it waits.
            now_s: Now.
            to_come: Tokens that it is expected to emit.
        """
        if not self._book.paced:
            return True
        account, stream = self._book.accounts[request.request_id], self._view.paced(request, now_s, now_s)
        tokens = 0 if account.pulls else request.num_tokens
        newcomer = Starting(
            stream,
            since_s,
            to_come,
            has_first=account.first_s is not None,
            first_due_s=account.first_due_s,
            prompt_tokens=tokens,
            prompt_steps=-(-tokens // self.most_tokens),
            is_top=stream.rank == self._view.top_rank,
        )
        return self._newcomers.bears(beside.streams, newcomer, now_s, beside.prompt_tokens)

    def leaves_out(self, now_s: float) -> frozenset[str]:
        """Whom the next step leaves out for the sake of the others' pace; asked once for each."""
        if self._book.paced or self._left_out:
            self._left_out = self._choose(now_s)
        return self._left_out

    def _prompt_tokens(self) -> int:
        """What the next step computes of prompts, and of sequences that are computed again."""
        running, book = self._view.running, self._book
        lacks: int = sum(
            [one.num_tokens - one.num_computed_tokens for one in running if one.is_prefill_chunk]
        )
        if not lacks:
            return 0
        return min(lacks, self.chunk_tokens() if book.parked or book.restoring else self.most_tokens)

    def _choose(self, now_s: float) -> frozenset[str]:
        if not self._times.is_known:
            return _NOBODY
        running, accounts = self._view.running, self._book.accounts
        decoding = [request for request in running if not request.is_prefill_chunk]
        context = sum([request.num_computed_tokens for request in decoding])
        prompt = self._prompt_tokens()
        full_s = self._times.predict_s(StepShape(len(decoding), context, prompt))
        tightest = min([accounts[name].tpot_s or 0.0 for name in self._book.paced], default=math.inf)
        if full_s <= MARGIN * tightest and not self._left_out:
            return _NOBODY
        paced = [self._view.paced(request, self._clock.ended_s, now_s) for request in decoding]
        left_out = self._composer.leaves_out(paced, now_s, prompt)
        for one in paced:
            accounts[one.request_id].left_out_s = one.token_s if one.request_id in left_out else None
        return left_out
