"""The requests of a decode engine as the decision rules see them.

Reads vLLM's scheduler and changes nothing in it. Serves models whose KV cache is in one group of blocks, of
which a request gives back none before it ends; the others are refused (see
`decode_node.engine.pressure_scheduler`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from decode_node.engine.accounts import StreamAccount
from slo.decode.composition import Paced
from slo.decode.output_length import OutputLengths
from slo.decode.predicted_peak import Holding, Pool
from slo.decode.restore import Parked
from slo.decode.victims import HORIZON_STEPS, Stream
from slo.request import JobId
from slo.tiers import Tier, TierSet

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class StreamView:
    """Looks at a scheduler's requests.

    Args:
        scheduler: vLLM's.
        accounts: What is remembered of its requests.
        tiers: Ranks and weights.

    Attributes:
        top_rank: The rank of the top tier.
        max_model_len: Tokens that a sequence has at most.
        block_tokens: Of a block.
        blocks_ahead: Blocks that a stream needs at most for the next `HORIZON_STEPS` steps.
    """

    def __init__(self, scheduler: Scheduler, accounts: Mapping[str, StreamAccount], tiers: TierSet) -> None:
        self._scheduler = scheduler
        self._accounts = accounts
        self._tiers = tiers
        self.top_rank = tiers.top_rank
        self.max_model_len = int(scheduler.max_model_len)
        self.block_tokens = int(scheduler.block_size)
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._held = self._manager.coordinator.single_type_managers[0].req_to_blocks
        self.blocks_ahead = -(-HORIZON_STEPS // self.block_tokens)

    @property
    def running(self) -> list[Request]:
        """Those that run; while vLLM composes a step, those that it sees of them."""
        running: list[Request] = self._scheduler.running
        return running

    def holders(self) -> list[Request]:
        """Who has memory: those that run, and those whose KV is on its way or has come."""
        pulled = [request for request in self._scheduler.skipped_waiting if self.blocks(request)]
        return [*self.running, *pulled]

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return int(self._pool.get_num_free_blocks())

    @property
    def pool_blocks(self) -> int:
        """All blocks; vLLM keeps one for itself."""
        return int(self._pool.num_gpu_blocks) - 1

    def blocks(self, request: Request) -> list[KVCacheBlock]:
        """What a request holds."""
        return self._held.get(request.request_id) or []

    def distinct_blocks(self, requests: Iterable[Request]) -> int:
        """Blocks that requests hold, each counted once."""
        held = [self.blocks(request) for request in requests]
        if sum(map(len, self._held.values())) == self.pool_blocks - self.free_blocks:
            return sum(map(len, held))  # nobody shares any
        return len({block.block_id for blocks in held for block in blocks})

    def prefix_tokens(self, request: Request) -> int:
        """Of a request without memory, the tokens whose KV others hold."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        found = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        held = sum([block.ref_cnt > 0 for block in found[0][0]])
        return int(held) * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence takes."""
        return -(-tokens // self.block_tokens)

    def next_blocks(self, request: Request, most_tokens: int) -> int:
        """Blocks that a request needs for the next so many tokens of its sequence, or all that it has."""
        new = max(1, min(most_tokens, request.num_tokens - request.num_computed_tokens))
        return max(0, self.blocks_for(request.num_computed_tokens + new) - len(self.blocks(request)))

    def own_blocks(self, request: Request) -> int:
        """Blocks that only this request holds."""
        return sum([block.ref_cnt == 1 for block in self.blocks(request)])

    def stream(self, request: Request, chunk_tokens: int, room_tokens: int, now_s: float) -> Stream:
        """A running request.

        Args:
            request: It.
            chunk_tokens: How much of its sequence the next step computes at most.
            room_tokens: For how much of it there has to be memory then; at least as much.
            now_s: Now.
        """
        account = self._accounts[request.request_id]
        emitted = request.num_output_tokens
        most = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        ahead = min(max(request.num_computed_tokens, request.num_tokens - 1) + HORIZON_STEPS, most)
        next_blocks = self.next_blocks(request, chunk_tokens)
        room_blocks = self.next_blocks(request, room_tokens)
        return Stream(
            request.request_id,
            self._tiers.rank(account.tier),
            self.weight(request),
            request.num_computed_tokens,
            self.own_blocks(request),
            next_blocks,
            max(room_blocks, self.blocks_for(ahead) - len(self.blocks(request))),
            emitted - account.started_tokens,
            self.preemptions(request),
            account.credit_s(emitted, now_s),
            account.may_leave,
            account.may_drop,
            room_blocks - next_blocks,
        )

    def job(self, request: Request) -> JobId:
        """The router's name for it."""
        return self._accounts[request.request_id].job

    def rank(self, request: Request) -> int:
        """Of its tier."""
        return self._tiers.rank(self._accounts[request.request_id].tier)

    def preemptions(self, request: Request) -> int:
        """How often its memory was taken; vLLM counts none from before it left."""
        return int(request.num_preemptions) + self._accounts[request.request_id].preemptions_before

    def weight(self, request: Request) -> float:
        """Of its tier."""
        tier = self._accounts[request.request_id].tier
        return self._tiers[tier].weight if tier in self._tiers else 1.0

    def waiting_to_run(self, request: Request) -> Stream:
        """A request whose KV has been pulled; it cannot be a victim before it runs."""
        account = self._accounts[request.request_id]
        needs = max(0, self.blocks_for(request.num_tokens) - len(self.blocks(request)))
        return Stream(request.request_id, self._tiers.rank(account.tier), 0.0, 0, 0, needs, needs, 0)

    def parked(self, request: Request, now_s: float) -> Parked:
        """A request that waits for memory."""
        account = self._accounts[request.request_id]
        since_s = account.arrived_s if account.parked_s is None else account.parked_s
        return Parked(
            request.request_id,
            account.tier,
            since_s,
            account.parked_s is None,
            self.preemptions(request),
            account.credit_s(request.num_output_tokens, now_s),
            request.num_tokens,
            account.may_drop,
            account.ahead_s,
        )

    def holding(self, request: Request, lengths: OutputLengths) -> Holding:
        """What a request holds, in whole blocks, or would hold, and for how much more memory is kept."""
        return self._holding(request, lengths.remaining)

    def expected(self, request: Request, lengths: OutputLengths) -> Holding:
        """What a request holds, in whole blocks, or would hold, and how much more it is expected to take."""
        return self._holding(request, lengths.expected)

    def _holding(self, request: Request, to_come: Callable[[Tier, str, int, int], int]) -> Holding:
        account, emitted = self._accounts[request.request_id], request.num_output_tokens
        remaining = to_come(account.tier, account.tenant, emitted, self._most(request))
        blocks = max(len(self.blocks(request)), self.blocks_for(request.num_tokens))
        rank, waits = self._tiers.rank(account.tier), not self.blocks(request)
        return Holding(blocks * self.block_tokens, remaining, rank, waits)

    def _most(self, request: Request) -> int:
        """Tokens that are still to come of a request at most."""
        most: int = min(
            request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens
        )
        return max(0, most)

    def pool(self, holders: Iterable[Request]) -> Pool:
        """The pool beside those that have memory, with room for all of their sequences."""
        held = missing = 0
        for request in holders:
            blocks = len(self.blocks(request))
            held += blocks
            missing += max(0, self.blocks_for(request.num_tokens) - blocks)
        free = self.free_blocks
        return Pool(
            self.pool_blocks * self.block_tokens,
            (free - missing) * self.block_tokens,
            max(0, held - (self.pool_blocks - free)) * self.block_tokens,
        )

    def paced(self, request: Request, token_s: float, now_s: float) -> Paced:
        """A request as far as its pace is concerned; it has got its latest token at `token_s`.

        One that has not begun counts with all of its sequence.
        """
        account = self._accounts[request.request_id]
        if account.left_out_s is not None:
            token_s = account.left_out_s
        credit_s = account.credit_s(request.num_output_tokens, now_s)
        context = request.num_computed_tokens or request.num_tokens
        rank = self._tiers.rank(account.tier)
        return Paced(request.request_id, context, account.tpot_s, credit_s, token_s, rank)
