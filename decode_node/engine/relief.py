"""Whose memory is taken when a decode engine's next step has too little, and what becomes of its KV.

Asks `slo.decode.victims`. Owns why each victim was chosen, until its memory is taken; that is done by the
scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slo.decode.step_time import StepTimes
from slo.decode.victims import HostRoom, Stream, TakenBy, Victim, VictimReason, VictimRules

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from decode_node.engine.leavers import Leavers
    from decode_node.engine.pace import Pace
    from decode_node.engine.view import StreamView
    from kv_transfer.swap.book import SwapBook


class Relief:
    """Chooses victims in one engine.

    Args:
        view: Its requests.
        pace: What its steps take.
        times: What a token that is computed again takes.
        leavers: How long the way through the prefill tier takes.
        swaps: Room in host memory; None without any.
    """

    def __init__(
        self, view: StreamView, pace: Pace, times: StepTimes, leavers: Leavers, swaps: SwapBook | None
    ) -> None:
        self._view = view
        self._pace = pace
        self._times = times
        self._leavers = leavers
        self._swaps = swaps
        self._levels = VictimRules(view.top_rank, 0.0, 0.0, 1)
        self._chosen: dict[str, tuple[VictimReason, TakenBy]] = {}
        self._forgets = False

    def victims(
        self, others: Sequence[Stream], chunk_tokens: int, room_tokens: int, now_s: float
    ) -> Iterator[Victim]:
        """Victims until the next step has what it needs, or vLLM's own rule is what is left.

        Each loses its memory before the next one is asked for.

        Args:
            others: Those that do not run yet and need memory in the next step as well.
            chunk_tokens: How much of a sequence a step computes.
            room_tokens: For how much of each sequence that runs there has to be memory; at least as much.
            now_s: Now.
        """
        view = self._view
        waited_for = sum([stream.next_blocks for stream in others])
        while (
            sum([view.next_blocks(request, room_tokens) for request in view.running]) + waited_for
            > view.free_blocks
        ):
            rules = self._rules(chunk_tokens)  # victims before have taken room in host memory
            streams = [view.stream(request, chunk_tokens, room_tokens, now_s) for request in view.running]
            if not (victims := rules.choose([*streams, *others], view.free_blocks)):
                break
            for victim in victims:
                if victim.by in {TakenBy.SWAP, TakenBy.RECOMPUTE}:
                    self._chosen[victim.request_id] = victim.reason, victim.by
                yield victim

    def level(self, request: Request) -> int:
        """The rank of a request's tier, one higher once it is immune; vLLM takes from the last first."""
        preemptions = self._view.preemptions(request)
        return self._levels.level(
            Stream(request.request_id, self._view.rank(request), 0.0, 0, 0, 0, 0, 0, preemptions)
        )

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Whoever loses its blocks within has its KV computed again: what there is of it is of no use."""
        self._forgets = True
        try:
            yield
        finally:
            self._forgets = False

    def preempts(self, request: Request, now_s: float) -> tuple[VictimReason, TakenBy]:
        """A request loses its blocks now: why, and what becomes of its KV.

        What goes to host memory is on its way there from now on; without room there it is computed again.
        """
        if (chosen := self._chosen.pop(request.request_id, None)) is None:
            chosen = self._vllm_chooses(request, now_s)
        reason, by = chosen
        if by is not TakenBy.SWAP or self._forgets or not self._swap_out(request):
            by = TakenBy.RECOMPUTE
        return reason, by

    def _vllm_chooses(self, request: Request, now_s: float) -> tuple[VictimReason, TakenBy]:
        """Likewise for one that vLLM has chosen in the midst of a step; it can only stay here."""
        chunk_tokens = self._pace.most_tokens
        stream = self._view.stream(request, chunk_tokens, chunk_tokens, now_s)._replace(may_leave=False)
        others_weight = sum([self._view.weight(other) for other in self._view.running])
        return VictimReason.VLLM, self._rules(chunk_tokens).taken_by(stream, others_weight)

    def _swap_out(self, request: Request) -> bool:
        """Have a request's blocks moved to host memory before somebody else gets them.

        One in the midst of a prompt whose log-probabilities are asked for cannot go on there: vLLM's second
        model runner forgets those that it has when a request loses its memory.
        """
        asked = getattr(request.sampling_params, "prompt_logprobs", None)
        is_in_prompt = request.num_computed_tokens < request.num_prompt_tokens
        if self._swaps is None or (is_in_prompt and asked is not None):
            return False
        blocks = [block.block_id for block in self._view.blocks(request)]
        return self._swaps.take(request.request_id, blocks, request.num_computed_tokens)

    def _rules(self, chunk_tokens: int) -> VictimRules:
        # Before any step was measured, a victim costs by its tokens.
        token_s = self._times.prompt_token_s or 1e-6
        return VictimRules(
            self._view.top_rank,
            token_s,
            self._pace.step_s(),
            chunk_tokens,
            self._host(),
            self._leavers.takes,
        )

    def _host(self) -> HostRoom | None:
        """Where KV can wait, once the workers have said how fast it gets there."""
        if self._swaps is None or self._swaps.block_s is None:
            return None
        return HostRoom(self._swaps.free_slots, self._swaps.block_s, self._view.block_tokens)
