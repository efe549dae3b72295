"""A checkpoint in KV blocks comes back as it was, and only blocks that its own step fills are written to."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from prefill_node.worker.boundary import Boundaries, BoundaryLevel
from prefill_node.worker.checkpoint import Checkpoint, hollow
from prefill_node.worker.kv_pages import KVPages, PagedCheckpoint, filled_whole
from slo.predict.pass_shape import PassShape

BLOCK = 4
BLOCKS = 24
ROW = 6
"""Values that a layer keeps of a token."""
LAYERS = 3


def spec(kind=FullAttentionSpec, dtype=torch.float32, **more):
    return kind(block_size=BLOCK, num_kv_heads=1, head_size=ROW // 2, dtype=dtype, **more)


def caches(kernel_blocks=1, dtype=torch.float32):
    shape = (BLOCKS * kernel_blocks, 2, BLOCK // kernel_blocks, ROW // 2)
    return {f"layer.{number}": torch.zeros(shape, dtype=dtype) for number in range(LAYERS)}


def pages(tensors, kind=None):
    """Of a model that can stop at the entry of each of its layers."""
    names = tuple(tensors)
    group = SimpleNamespace(layer_names=list(names), kv_cache_spec=kind or spec())
    config = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)
    begun = tuple(range(LAYERS))
    boundaries = Boundaries(PassShape.even(LAYERS), BoundaryLevel.LAYER, "", names, begun)
    return KVPages.of(config, tensors, boundaries)


def checkpoint(rows, width=5, dtype=torch.float32, boundary=1):
    total = sum(tokens for _, tokens in rows)
    entering = (torch.randn(total, width).to(dtype), torch.randn(total, 2, 3).to(dtype))
    return Checkpoint(boundary, rows, entering)


def same(left, right):
    return left.rows == right.rows and all(map(torch.equal, left.entering, right.entering))


@st.composite
def steps(draw):
    """Of each request: how many tokens were computed before the step, and how many it computes."""
    return draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 15)), min_size=1, max_size=3))


@given(steps(), st.sampled_from([1, 2]), st.integers(0, LAYERS - 1), st.randoms())
def test_it_comes_back_as_it_was_and_nothing_else_is_written_to(parts, kernel_blocks, boundary, rng):
    tensors = caches(kernel_blocks)
    room = pages(tensors)
    free = rng.sample(range(BLOCKS), BLOCKS)
    rows, blocks = [], {}
    for number, (computed, tokens) in enumerate(parts):
        ids = [free.pop() for _ in range(math.ceil((computed + tokens) / BLOCK))]
        rows.append((f"request-{number}", tokens))
        blocks[f"request-{number}"] = filled_whole([ids], [BLOCK], computed, tokens)
    kept = checkpoint(tuple(rows), boundary=boundary)
    expected = Checkpoint(boundary, kept.rows, tuple(tensor.clone() for tensor in kept.entering))
    stored = room.keep(kept, boundary, blocks)
    assert same(stored.select(kept.rows), expected)

    own = {block for groups in blocks.values() for block in groups[0]}
    for number, cache in enumerate(tensors.values()):
        whole = cache.unflatten(0, (BLOCKS, kernel_blocks))
        written = {block for block in range(BLOCKS) if whole[block].any()}
        assert written <= (own if number >= boundary else set())

    some = [row for row in rows if rng.random() < 0.5]
    rng.shuffle(some)
    if some:
        again = stored.select(tuple(some))
        assert same(again, expected.select(tuple(some)))
    room_for = sum(len(groups[0]) for groups in blocks.values()) * BLOCK * ROW * 4 * (LAYERS - boundary)
    values = sum(tokens for _, tokens in rows) * 11 * 4
    assert values - room_for <= stored.size_bytes <= values
    if len(rows) == 1:
        assert stored.size_bytes == max(0, values - room_for)


def test_blocks_of_a_request_that_is_gone_are_not_read():
    tensors = caches()
    rows = (("gone", 8), ("stays", 8))
    kept = checkpoint(rows)
    expected = kept.select(rows[1:])
    stored = pages(tensors).keep(kept, 1, {"gone": ((3, 4),), "stays": ((5, 6),)})
    assert isinstance(stored, PagedCheckpoint)
    for cache in tensors.values():
        cache[[3, 4]] = math.nan  # somebody else's by now
    assert same(stored.select(rows[1:]), expected)


def test_a_step_of_other_tokens_does_not_get_it():
    stored = pages(caches()).keep(checkpoint((("a", 8),)), 1, {"a": ((3, 4),)})
    assert stored.select((("a", 4),)) is None
    assert stored.select((("b", 8),)) is None


def test_what_is_not_of_the_caches_type_or_not_laid_out_by_token_stays_in_memory_of_its_own():
    whole, numbers = torch.randn(8, 5), torch.arange(8)
    table, nothing = torch.randn(3, 5), torch.empty(0, 5)
    entering = (whole, numbers, hollow(whole), [table, nothing], None)
    kept = Checkpoint(1, (("a", 8),), entering)
    stored = pages(caches()).keep(kept, 1, {"a": ((3, 4),)})
    assert stored.size_bytes == numbers.nbytes + table.nbytes
    back = stored.select(kept.rows)
    assert torch.equal(back.entering[0], whole)
    assert back.entering[1] is numbers
    assert back.entering[2].is_meta
    assert back.entering[3][0] is table
    assert back.entering[3][1] is nothing
    assert back.entering[4] is None

    for odd in (float("nan"), float("inf")):
        ready = torch.randn(8, 5)
        ready[3, 2] = odd  # memory for a result that is not there yet
        kept = Checkpoint(1, (("a", 8),), (whole, ready))
        stored = pages(caches()).keep(kept, 1, {"a": ((3, 4),)})
        assert stored.size_bytes == ready.nbytes
        assert stored.select(kept.rows).entering[1] is ready

    other = checkpoint((("a", 8),), dtype=torch.bfloat16)
    assert pages(caches()).keep(other, 1, {"a": ((3, 4),)}) is other


def test_without_a_whole_block_a_checkpoint_stays_where_it_is():
    kept = checkpoint((("a", 3),))
    assert pages(caches()).keep(kept, 1, {"a": ((),)}) is kept
    assert filled_whole([[7, 8, 9]], [BLOCK], 1, 6) == ((),), "both blocks hold other tokens as well"
    assert filled_whole([[7, 8, 9]], [BLOCK], 4, 6) == ((8,),)
    assert filled_whole([[7, 8, 9]], [BLOCK], 3, 9) == ((8, 9),)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (spec(SlidingWindowSpec, sliding_window=4), torch.float32),
        (spec(dtype=torch.uint8), torch.uint8),
        (spec(dtype=torch.float8_e4m3fn), torch.float8_e4m3fn),
        (spec(tokens_per_state=4), torch.float32),
    ],
)
def test_layers_whose_blocks_are_not_only_what_a_step_fills_are_no_room(kind, dtype):
    room = pages(caches(dtype=dtype), kind)
    assert room.room() == (0.0,) * LAYERS
    kept = checkpoint((("a", 8),))
    assert room.keep(kept, 0, {"a": ((3, 4),)}) is kept


def test_caches_that_cannot_be_written_to_by_block_are_found_out():
    tensors = caches()
    assert pages(tensors).why_inexact() == ""
    assert not any(cache.any() for cache in tensors.values()), "it leaves no trace"
    tensors["layer.1"] = torch.zeros(1, 1, BLOCK, ROW // 2).expand(BLOCKS, 2, BLOCK, ROW // 2)
    with pytest.raises(RuntimeError, match="memory"):
        pages(tensors).why_inexact()


def test_a_layer_that_reads_the_cache_of_one_before_it_is_no_room():
    tensors = caches()
    tensors["layer.2"] = tensors["layer.1"]
    of_layer = ROW * 4.0
    assert pages(caches()).room() == (3 * of_layer, 2 * of_layer, of_layer)
    assert pages(tensors).room() == (2 * of_layer, of_layer, 0.0)
