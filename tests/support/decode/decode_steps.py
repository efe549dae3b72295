"""A decode engine's scheduler, stepped without a model: tokens come from nowhere."""

from __future__ import annotations

from itertools import chain

from real_schedulers import BLOCK
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from slo.request import TENANT_XARG, TIER_XARG, TPOT_XARG


class Stepped:
    """A scheduler whose steps a test takes one at a time."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.tokens: dict[str, list[int]] = {}
        self.finished: list[str] = []
        self.reasons: dict[str, FinishReason] = {}
        self.why: dict[str, int | str | None] = {}
        self.preempted: list[str] = []
        self.outputs = []
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        take = scheduler._preempt_request

        def counting(request, *args, **kwargs):
            self.preempted.append(request.request_id)
            take(request, *args, **kwargs)

        scheduler._preempt_request = counting

    def add(  # noqa: PLR0913 - most have a default
        self,
        name,
        prompt,
        max_tokens,
        *,
        tier="standard",
        tpot_s=None,
        tenant="",
        tokens=None,
        grammar=None,
        **more,
    ):
        """A request; its prompt is a length, of tokens that no other prompt has, or the tokens.

        Its grammar is one of vLLM's that has been compiled.
        """
        first = 1000 * (len(self.tokens) + 1)
        ids = list(range(first, first + prompt)) if tokens is None else tokens
        extra = {TIER_XARG: tier, TENANT_XARG: tenant, **more}
        if tpot_s is not None:
            extra[TPOT_XARG] = tpot_s
        held = None if grammar is None else StructuredOutputsParams(json_object=True)
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args=extra, structured_outputs=held
        )
        request = Request(name, ids, params, None, block_hasher=self._hasher)
        if grammar is not None:
            request.structured_output_request.grammar = grammar
        self.tokens[name] = []
        self.scheduler.add_request(request)
        return request

    def step(self):
        """One step: whoever has computed all it has gets the number of its token."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        self.outputs.append(output)
        self.check_blocks()
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([len(self.tokens[name])] if done else [])
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        for outputs in scheduler.update_from_output(output, ran).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.finished:
                    self.finished.append(one.request_id)
                    self.reasons[one.request_id] = one.finish_reason
                    self.why[one.request_id] = one.stop_reason
        return output

    def finish(self, within=20_000):
        """Step until all have ended, each once, with all their tokens."""
        for _ in range(within):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests, "somebody never ended"
        assert sorted(self.finished) == sorted(set(self.finished))
        for tokens in self.tokens.values():
            assert tokens == list(range(len(tokens)))
        assert self.scheduler.kv_cache_manager.usage == 0.0
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.scheduler.skipped_waiting

    def check_blocks(self):
        """See `check_blocks`."""
        check_blocks(self.scheduler)


def check_blocks(scheduler):
    """Free blocks and held ones are the pool, and each is held as often as it says."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    counts: dict[int, int] = {}
    for of_group in manager.coordinator.single_type_managers:
        for block in chain.from_iterable(of_group.req_to_blocks.values()):
            if not block.is_null:
                counts[block.block_id] = counts.get(block.block_id, 0) + 1
    assert pool.get_num_free_blocks() + len(counts) == pool.num_gpu_blocks - 1
    assert all(pool.blocks[number].ref_cnt == count for number, count in counts.items())
    for request in scheduler.running:
        assert request.status == RequestStatus.RUNNING
        held = len(manager.get_blocks(request.request_id).blocks[0])
        assert held * BLOCK >= request.num_computed_tokens
