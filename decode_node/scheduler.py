"""vLLM's schedulers, with requests that go on from tokens generated elsewhere.

They run in the EngineCore process of a decode replica. The connector pulls the KV cache of the prompt, and
the request is then one that has generated its carried tokens and computes the last of them next. It is the
same whether or not a step is composed while the one before it still runs. Owns, too, whose pull has failed
where a model's KV cache is in several groups, how many pulls are done, which models have no prompt cut into
chunks of ours, and that an answer ends whose grammar takes too long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from decode_node.grammars.bounded import TOO_SLOW, BoundedGrammar
from kv_transfer.cache_groups import NULL_BLOCK, keep_for_last_token
from sampling.carried import Carried
from telemetry.pulls import PULLS_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class CarryingScheduler(Scheduler):  # type: ignore[misc] # vLLM ships no types for it
    """`scheduler_cls` of a decode replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.vllm_config.model_config.is_mm_prefix_lm:
            # Each token of an image attends to all of it, and vLLM parts one that a chunk begins with.
            self.scheduler_config.long_prefill_token_threshold = 0
        keep_for_last_token(self.kv_cache_manager)
        self._pulls_done = 0
        """Requests whose pull is done since the last statistics."""

    def add_request(self, request: Request) -> None:
        """Queue a request with what has been generated of it."""
        if (carried := Carried.of(request.sampling_params)) is not None:
            request.append_output_token_ids(carried.token_ids)
            if len(carried.token_ids) > 1:
                # vLLM counts no more cached tokens than the prompt has; more can be cached, or pulled, here.
                request.prefill_stats = None
        super().add_request(request)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Statistics as vLLM keeps them, with how many pulls are done since the last ones."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._pulls_done:
            self._tell(stats, PULLS_KEY, self._pulls_done)
            self._pulls_done = 0
        return stats

    def _tell(self, stats: Any, key: str, what: Any) -> None:
        """Put something of ours among a step's statistics."""
        nothing = self.connector.build_kv_connector_stats().data
        stats.kv_connector_stats = {**nothing, **(stats.kv_connector_stats or {}), key: what}

    def _update_from_kv_xfer_finished(self, kv_connector_output: KVConnectorOutput) -> None:
        """Take in whose pulls are over, at all ranks; a request with a failed one has ended before."""
        for name in kv_connector_output.finished_recving or ():
            self._pulls_done += self.requests[name].status != RequestStatus.FINISHED_ERROR
        super()._update_from_kv_xfer_finished(kv_connector_output)

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a request has what it has waited for; if that is its compiled grammar, it is bounded."""
        has_compiled = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_promoted = bool(super()._try_promote_blocked_waiting_request(request))
        if has_compiled and is_promoted:
            structured = request.structured_output_request
            structured.grammar = BoundedGrammar(structured.grammar)
        return is_promoted

    def _update_request_with_output(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """What a request has generated, and whether it ends, as it does if its grammar takes too long."""
        token_ids, has_ended = super()._update_request_with_output(request, *args, **kwargs)
        structured = request.structured_output_request
        grammar = None if structured is None else structured.grammar
        if not has_ended and isinstance(grammar, BoundedGrammar) and grammar.is_too_slow:
            request.status, request.stop_reason = RequestStatus.FINISHED_ERROR, TOO_SLOW
            has_ended = True
        return token_ids, has_ended

    def _update_requests_with_invalid_blocks(
        self,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> tuple[set[str], int, set[int]]:
        """Which of these requests have blocks whose content is not theirs; their tokens, and blocks to evict.

        VLLM's own knows one group of KV caches only. Of several, one such block in any is enough: nothing of
        the request counts as computed, and all it holds leaves the prefix cache, where it may be in there.
        """
        if len(self.kv_cache_config.kv_cache_groups) == 1:
            return super()._update_requests_with_invalid_blocks(  # type: ignore[no-any-return]
                requests, invalid_block_ids, num_scheduled_tokens, evict_blocks
            )
        affected: set[str] = set()
        tokens, evicted = 0, set[int]()
        for request in requests:
            held = set().union(*self.kv_cache_manager.get_block_ids(request.request_id)) - {NULL_BLOCK}
            if held.isdisjoint(invalid_block_ids):
                continue
            affected.add(request.request_id)
            tokens += request.num_computed_tokens
            request.num_computed_tokens = 0
            if evict_blocks:
                evicted |= held
        return affected, tokens, evicted


class AsyncCarryingScheduler(CarryingScheduler, AsyncScheduler):  # type: ignore[misc] # the same
    """`scheduler_cls` of a decode replica that composes a step while the one before it runs."""
