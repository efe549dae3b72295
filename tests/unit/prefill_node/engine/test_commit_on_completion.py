"""What vLLM's memory means to the queue, on its real KV cache manager."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from prefill_node.engine.commit_on_completion import CommitOnCompletion
from prefill_node.engine.queue import QueueView
from prefill_node.engine.stepping.memory import Memory
from prefill_node.engine.stepping.step_choice import ChoiceRules
from prefill_node.engine.stepping.stepper import Stepper
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import Limits
from slo.queue.order import QueueOrder
from slo.request import DEADLINE_XARG

BLOCK, WINDOW, CHUNK, POOL = 16, 64, 128, 100
SIZES = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def manager(*groups, caches=False):
    init_none_hash(sha256)
    config = KVCacheConfig(
        num_blocks=POOL,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(groups)],
    )
    made = KVCacheManager(config, 4096, BLOCK, BLOCK, max_in_flight_tokens=CHUNK, enable_caching=caches)
    CommitOnCompletion.adopt(made)
    return made


def prefilled(kv, request, tokens):
    """The request with so many tokens computed, in chunks."""
    while request.num_computed_tokens < tokens:
        new = min(CHUNK, tokens - request.num_computed_tokens)
        assert kv.allocate_slots(request, new) is not None
        request.num_computed_tokens += new
    return request


def prompt(tokens, name="r", own=0, **sampling):
    """Of so many tokens, the last `own` of which no other prompt has."""
    params = SamplingParams(max_tokens=1, **sampling)
    hasher = get_request_block_hasher(BLOCK, sha256)
    ids = [7] * (tokens - own) + [sum(map(ord, name))] * own
    return Request(name, ids, params, pooling_params=None, block_hasher=hasher)


FULL = FullAttentionSpec(**SIZES)
SLIDING = SlidingWindowSpec(**SIZES, sliding_window=WINDOW)


@pytest.mark.parametrize(("tokens", "computed"), [(160, 0), (165, 0), (320, 128), (320, 320)])
def test_full_attention_needs_a_block_for_each_of_its_tokens(tokens, computed):
    kv = manager(FULL)
    held, missing = kv.blocks_of(prefilled(kv, prompt(tokens), computed))
    assert (held, missing) == (-(-computed // BLOCK), -(-tokens // BLOCK) - -(-computed // BLOCK))


def test_of_a_window_only_what_is_held_at_a_time_is_missing():
    """A prompt that vLLM can run would otherwise wait for ever: 2 x 80 blocks do not fit into 100."""
    kv = manager(FULL, SLIDING)
    request = prompt(80 * BLOCK)
    held, missing = kv.blocks_of(request)
    assert held == 0
    assert 80 < missing < POOL
    prefilled(kv, request, 80 * BLOCK)
    held, missing = kv.blocks_of(request)
    assert missing == 0
    assert held == POOL - 1 - kv.block_pool.get_num_free_blocks(), "freed blocks of the window are not held"


def test_what_is_missing_is_what_vllm_asks_for_at_admission():
    for tokens in range(BLOCK, 120 * BLOCK, 5 * BLOCK):
        kv = manager(FULL, SLIDING)
        request = prompt(tokens)
        _, missing = kv.blocks_of(request)
        fits = kv.allocate_slots(request, min(tokens, CHUNK), full_sequence_must_fit=True) is not None
        assert fits == (missing <= POOL - 1)


def test_a_prefix_that_another_holds_is_shared_if_it_would_not_fit_otherwise():
    kv = manager(FULL, caches=True)
    holder = prefilled(kv, prompt(64 * BLOCK, "holder"), 64 * BLOCK)
    kv.cache_blocks(holder, 48 * BLOCK)
    assert shared(kv, prompt(30 * BLOCK)) == 0, "35 are free"
    assert shared(kv, prompt(48 * BLOCK)) == 47, "the last token is computed, in a block of its own"
    assert shared(kv, prompt(50 * BLOCK, skip_reading_prefix_cache=True)) == 0
    sharing = prompt(50 * BLOCK)
    assert shared(kv, sharing) == 48
    hits, cached, _ = kv.get_computed_blocks(sharing)
    assert kv.allocate_slots(sharing, 2 * BLOCK, cached, hits, full_sequence_must_fit=True) is not None
    kv.free(sharing)
    kv.free(holder)
    prefilled(kv, prompt(60 * BLOCK, "other"), 60 * BLOCK)
    assert shared(kv, prompt(50 * BLOCK)) == 0, "what nobody holds any more is free to be taken"


def holder(kv, name, blocks, own, computed=None):
    """A prompt of so many blocks, the last `own` its own, of which it has computed all or so many.

    What the prefix cache has of it is not computed again.
    """
    one = prompt(blocks * BLOCK, name, own * BLOCK)
    hits, cached, _ = kv.get_computed_blocks(one)
    assert kv.allocate_slots(one, BLOCK, cached, hits) is not None
    one.num_computed_tokens = cached + BLOCK
    prefilled(kv, one, (computed or blocks) * BLOCK)
    kv.cache_blocks(one, one.num_computed_tokens)
    return one


def test_who_loses_its_memory_frees_what_nobody_else_holds():
    """What several hold is free when the last of them has lost it."""
    kv = manager(FULL, caches=True)
    ended = holder(kv, "ended", 20, 0)
    a, b = holder(kv, "a", 25, 5), holder(kv, "b", 27, 7)
    assert kv.blocks_of(a)[0] == 25
    assert list(kv.freed_blocks_of([[a], [b]])) == [5, 7]
    kv.free(ended)
    assert list(kv.freed_blocks_of([[a], [b]])) == [5, 7 + 20]
    assert list(kv.freed_blocks_of([[b]])) == [7]
    assert list(kv.freed_blocks_of([[a, b]])) == [5 + 7 + 20], "of one step"
    before = kv.block_pool.get_num_free_blocks()
    kv.free(a)
    kv.free(b)
    assert kv.block_pool.get_num_free_blocks() == before + 5 + 7 + 20


def test_of_a_window_what_has_left_it_frees_nothing():
    kv = manager(FULL, SLIDING)
    request = prefilled(kv, prompt(40 * BLOCK), 40 * BLOCK)
    held, _ = kv.blocks_of(request)
    assert list(kv.freed_blocks_of([[request]])) == [held]


def between_chunks(kv, name, tokens, last):
    """A prompt of 640 tokens that has computed so many, the last ones in a chunk of their own."""
    request = prefilled(kv, prompt(40 * BLOCK, name), tokens - last)
    return prefilled(kv, request, tokens)


def leave_free(kv, blocks):
    """The others are taken."""
    kv.block_pool.get_new_blocks(kv.block_pool.get_num_free_blocks() - blocks)


def test_a_chunk_that_is_longer_than_the_last_is_cut_to_what_there_is_room_for_in_its_windows():
    """VLLM would take what the request holds, and compute all of it again."""
    kv = manager(FULL, SLIDING)
    request = between_chunks(kv, "r", 33 * BLOCK, last=BLOCK)
    assert kv.tokens_with_room([request], 7 * BLOCK) == 7 * BLOCK
    _, missing = kv.blocks_of(request)
    assert missing == 7, "its window has moved on"
    leave_free(kv, missing)
    room = kv.tokens_with_room([request], 7 * BLOCK)
    assert 3 * BLOCK <= room < 7 * BLOCK
    assert kv.allocate_slots(request, room + 1) is None
    assert kv.allocate_slots(request, room) is not None


def test_of_several_that_have_started_the_first_get_all_that_they_ask_for():
    kv = manager(FULL, SLIDING)
    first, second = (between_chunks(kv, name, 25 * BLOCK, last=BLOCK) for name in ("first", "second"))
    leave_free(kv, 30)
    assert kv.tokens_with_room([first, second], 8 * BLOCK) == 8 * BLOCK, "the first takes it all"
    room = kv.tokens_with_room([first, second], 30 * BLOCK)
    assert 15 * BLOCK <= room < 30 * BLOCK
    assert kv.allocate_slots(first, 15 * BLOCK) is not None
    assert kv.allocate_slots(second, room - 15 * BLOCK + 1) is None


def test_who_finds_no_room_at_all_is_left_to_vllm():
    kv = manager(FULL, SLIDING)
    request = between_chunks(kv, "r", 33 * BLOCK, last=BLOCK)
    leave_free(kv, 0)
    assert kv.allocate_slots(request, BLOCK) is None
    leave_free(kv, 0)
    assert kv.tokens_with_room([request], BLOCK) == 1


def test_memory_is_not_taken_from_one_that_shares_it_with_what_has_ended():
    """The work of that one would be lost, and vLLM refuse the other all the same."""
    kv = manager(FULL, caches=True)
    holder(kv, "ended", 40, 0)
    long = holder(kv, "long", 60, 20, computed=45)
    urgent = prompt(60 * BLOCK, "urgent", 60 * BLOCK, extra_args={DEADLINE_XARG: 1.0})
    scheduler = SimpleNamespace(
        running=[long], waiting=[urgent], requests={"long": long, "urgent": urgent}, kv_cache_manager=kv
    )
    stepper = Stepper(ChoiceRules(QueueOrder.SEDF, PrefillPredictor(1e-3, 0.0), 1), Limits())
    view = QueueView(scheduler, stepper)
    memory = Memory(shared_blocks=view.shared_blocks, freed_blocks=view.freed_blocks)
    free_blocks = kv.block_pool.get_num_free_blocks()
    assert (free_blocks, kv.blocks_of(long)) == (54, (45, 15))
    command = stepper.next_step(view.queued(), [], free_blocks, 0.0, memory=memory)
    assert command.requests == ("long",), "it goes on"


def shared(kv, request):
    return kv.shared_blocks_of(request, kv.blocks_of(request)[1])
