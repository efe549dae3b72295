"""vLLM's real scheduler and KV cache manager, without a model.

What stands in for the model runner keeps its books as vLLM's runners do, and holds that what a step reads of
the KV memory is what was computed of its sequences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from itertools import accumulate

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from sampling.carried import Carried

BLOCK = 16
BLOCK_BYTES = 1024


@cache
def _config(model):
    return EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        block_size=BLOCK,
        enforce_eager=True,
        async_scheduling=False,
    ).create_engine_config()


def build(  # noqa: PLR0913 - most have a default
    scheduler_cls,
    model,
    blocks,
    *,
    max_num_seqs=64,
    chunk=64,
    budget=2048,
    additional=None,
    window=0,
    one_window=False,
    transfer=None,
    whole_images=False,
):
    """A scheduler of this class with so many usable blocks of 16 tokens; those of one test share a config.

    A step takes `budget` tokens, of a prompt `chunk`; 0 for as many as the step takes.
    With a window its second layer attends to so many tokens only, with `one_window` its only one. With
    `transfer`, which are the arguments of vLLM's `KVTransferConfig`, it has a connector; a block takes
    `BLOCK_BYTES` then. `whole_images` is what vLLM says of a model each of whose image tokens attends to all
    of the image.
    """
    config = _config(model)
    config.model_config.is_mm_prefix_lm = whole_images
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.long_prefill_token_threshold = chunk
    config.scheduler_config.max_num_batched_tokens = budget
    config.additional_config = additional or {}
    config.kv_transfer_config = KVTransferConfig(**transfer) if transfer else None
    config.cache_config.num_gpu_blocks = blocks + 1
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [] if one_window else [FullAttentionSpec(**sizes)]
    if window:
        specs.append(SlidingWindowSpec(**sizes, sliding_window=window))
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    memory = KVCacheTensor(BLOCK_BYTES * (blocks + 1), ["layer.0"], 0, BLOCK_BYTES)
    kv = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[memory], kv_cache_groups=groups)
    return scheduler_cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


class Clock:
    """Stands in for the module `time` in a scheduler."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s


def prefixes(tokens):
    """What stands for the KV of each token: its sequence up to there."""
    return [*accumulate(tokens, lambda before, token: hash((before, token)))]


class Row:
    """A request as the model runner knows it."""

    def __init__(self, tokens, computed, blocks):
        self.prefixes = prefixes(tokens)
        self.computed = computed
        self.blocks = [[*group] for group in blocks]

    def append(self, token):
        """It has generated one more."""
        self.prefixes.append(hash((self.prefixes[-1], token)))


class Pages:
    """The runner's requests and KV memory: which prefix each place of each block was computed for.

    Args:
        places: Of so many requests it can know at a time.
        window: Tokens that the second layer attends to.
    """

    def __init__(self, places=math.inf, window=0):
        self.rows = {}
        self._places = places
        self._reach = (math.inf, window)
        self._written = defaultdict(lambda: [None] * BLOCK)

    def take(self, output):
        """What the scheduler tells of its requests."""
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = Row(_tokens_of(new), new.num_computed_tokens, new.block_ids)
        assert len(self.rows) <= self._places
        cached = output.scheduled_cached_reqs
        for name, computed, new in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.rows[name] = Row(cached.all_token_ids[name], computed, new)
            else:
                row = self.rows[name]
                assert row.computed == computed
                for blocks, more in zip(row.blocks, new or (), strict=new is not None):
                    blocks.extend(more)

    def read(self, name, written=0):
        """All that attention looks at was computed for this sequence, by passes that were not stopped.

        So many of the tokens that were computed are of the pass that reads.
        """
        row = self.rows[name]
        for group, reach in zip(range(len(row.blocks)), self._reach, strict=False):
            start = int(max(0, row.computed - written + 1 - reach))
            for at in range(start - start % BLOCK, row.computed, BLOCK):
                first, last = max(start, at), min(at + BLOCK, row.computed)
                found = self._written[row.blocks[group][at // BLOCK]][first - at : last - at]
                assert found == row.prefixes[first:last], (name, group, at)

    def write(self, name, tokens, *, complete):
        """A pass has computed so many tokens; one that stopped has left some of its layers as they were."""
        row = self.rows[name]
        for group in range(len(row.blocks)):
            for at in range(row.computed, row.computed + tokens):
                block = self._written[row.blocks[group][at // BLOCK]]
                block[at % BLOCK] = row.prefixes[at] if complete else None
        if complete:
            row.computed += tokens

    def block(self, number):
        """What is in a block, of whichever layer."""
        return [*self._written[number]]

    def overwrite(self, number, found):
        """Something else than a pass writes to a block."""
        self._written[number][: len(found)] = found

    def clear(self):
        """All KV is of no use any more."""
        self._written.clear()


def _tokens_of(new):
    """Of a request that is new to the runner; only vLLM's second one is told all of them."""
    if new.prefill_token_ids:
        return new.prefill_token_ids
    carried = Carried.of(new.sampling_params)
    return new.prompt_token_ids + ([] if carried is None else carried.token_ids)
