"""What a prefill engine has computed in vain, told as `Dropped`.

Owns what each request found cached when it started, and who left while a step computed it. That work is
dropped is decided by `prefill_node.engine.scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prefill_node.board.events import Dropped, DropReason
from prefill_node.engine.board_writer import Bulletin
from prefill_node.engine.stepping.suspension import Suspensions
from slo.predict.prefill_time import attention_pairs


class _Left(NamedTuple):
    """A request that has left while steps compute it, with its tokens before these steps and in them."""

    job: str
    before_tokens: int
    tokens: int


class WastedWork:
    """The account of one engine.

    Args:
        suspensions: Its suspended steps; who loses its work leaves them.
        job_of: The job of a request that is here.
        bulletin: Where it is told.
    """

    def __init__(self, suspensions: Suspensions, job_of: Callable[[str], str], bulletin: Bulletin) -> None:
        self._suspensions = suspensions
        self._job_of = job_of
        self._bulletin = bulletin
        self._hit_tokens: dict[str, int] = {}
        self._left: dict[str, _Left] = {}

    def started(self, request_id: str, cached_tokens: int) -> None:
        """A request starts, of which the prefix cache holds so many tokens."""
        self._hit_tokens[request_id] = cached_tokens

    def forget(self, request_id: str) -> None:
        """A request holds nothing any more."""
        self._hit_tokens.pop(request_id, None)

    def dropped(self, request_id: str, reason: DropReason, computed_tokens: int, now_s: float) -> None:
        """A request loses what was computed of it, and leaves its suspended step, if it is in one."""
        hit_tokens = self._hit_tokens.get(request_id, 0)
        chunk_tokens = max(0, computed_tokens - hit_tokens)
        chunk_pairs = attention_pairs(chunk_tokens, hit_tokens)
        jobs = (self._job_of(request_id),)
        if (step := self._suspensions.step_of(request_id)) is not None:
            tokens = step.members[request_id]
            pairs = attention_pairs(tokens, computed_tokens)
            self._suspensions.forget(request_id, now_s, pairs)
            dropped = Dropped(jobs, reason, step.done, tokens, pairs, now_s, chunk_tokens, chunk_pairs)
        elif chunk_tokens:
            dropped = Dropped(jobs, reason, 1.0, chunk_tokens, chunk_pairs, now_s)
        else:
            return
        self._bulletin.notice(dropped)

    def left_in_flight(self, request_id: str, computed_tokens: int, in_flight_tokens: int) -> None:
        """A request leaves while steps compute so many tokens of it, behind those that are computed."""
        self._left[request_id] = _Left(self._job_of(request_id), computed_tokens, in_flight_tokens)

    def step_over(self, request_id: str, tokens: int, done: float, now_s: float) -> None:
        """A step has ended that had so many tokens of a request, and kept `done` of it.

        If the request has left while the step ran, that was computed in vain.
        """
        if (left := self._left.pop(request_id, None)) is None:
            return
        if done:
            pairs = attention_pairs(tokens, left.before_tokens)
            self._bulletin.notice(Dropped((left.job,), DropReason.ABANDONED, done, tokens, pairs, now_s))
        if left.tokens > tokens:  # it is in the step behind this one, too
            self._left[request_id] = _Left(left.job, left.before_tokens + tokens, left.tokens - tokens)
