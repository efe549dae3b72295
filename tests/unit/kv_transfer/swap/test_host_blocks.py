"""Whole blocks move bit for bit, whatever the engine's tensors look like."""

import pytest
import torch

from kv_transfer.swap.book import Move
from kv_transfer.swap.host_blocks import HostBlocks, NoHostMemoryError, SwapSpeed

BLOCKS, SLOTS = 8, 4


def caches():
    """Of several layouts: dense, two of the kernel's blocks to one, strided, narrower ones, shared."""
    torch.manual_seed(0)
    dense = torch.randn(BLOCKS, 2, 4, 6)
    small = torch.randn(2 * BLOCKS, 2, 2, 6)
    strided = torch.randn(BLOCKS, 4, 2, 6).transpose(1, 2)
    half = torch.randn(BLOCKS, 2, 4, 6).to(torch.bfloat16)
    bytes_ = torch.randint(0, 255, (BLOCKS, 2, 4, 6)).to(torch.uint8)
    eight = torch.randn(BLOCKS, 2, 4, 6).to(torch.float8_e4m3fn)
    return [dense, small, strided, half, bytes_, eight, dense]


def as_bytes(layers):
    """The same memory; torch compares no 8-bit floats."""
    return [layer.view(torch.uint8) if layer.dtype.itemsize == 1 else layer for layer in layers]


def test_what_comes_back_elsewhere_is_what_went_out():
    layers = caches()
    before = [layer.clone() for layer in layers]
    pool = HostBlocks(layers, BLOCKS, SLOTS)
    pool.take((Move(6, 1), Move(2, 2), Move(3, 0)))
    for layer in layers:
        layer.zero_()
    layers, before = as_bytes(layers), as_bytes(before)
    pool.give((Move(0, 2), Move(5, 0), Move(7, 1)))
    for layer, old in zip(layers, before, strict=True):
        ratio = len(layer) // BLOCKS
        for new, was in ((0, 2), (5, 3), (7, 6)):
            assert torch.equal(layer[new * ratio : (new + 1) * ratio], old[was * ratio : (was + 1) * ratio])
        assert not layer[1 * ratio : 5 * ratio].any(), "others are as they were"


def test_a_block_that_was_taken_can_be_written_to():
    layer = torch.arange(BLOCKS * 2.0).reshape(BLOCKS, 2)
    pool = HostBlocks([layer], BLOCKS, SLOTS)
    pool.take((Move(0, 0), Move(1, 1)))
    pool.give((Move(1, 0),))
    pool.give((Move(2, 1),))
    assert layer[:3].tolist() == [[0, 1], [0, 1], [2, 3]]


def test_measuring_changes_no_block_and_the_slowest_worker_counts():
    layers = caches()
    before = [layer.clone() for layer in layers]
    speed = HostBlocks(layers, BLOCKS, SLOTS).measure()
    assert speed.block_s > 0
    assert all(map(torch.equal, as_bytes(layers), as_bytes(before)))
    assert SwapSpeed(1.0).aggregate(SwapSpeed(2.0)) == SwapSpeed(2.0)


def test_a_pool_that_the_host_has_no_memory_for_is_refused_with_what_to_do():
    with pytest.raises(NoHostMemoryError, match=r"for 1099511627776 KV blocks.*pressure\.swap_gib"):
        HostBlocks([torch.zeros(BLOCKS, 1024)], BLOCKS, 1 << 40)


def test_a_cache_that_is_not_made_of_blocks_is_refused():
    for cache in (torch.zeros(7, 2), torch.zeros(8), [torch.zeros(8, 2)]):
        with pytest.raises(ValueError, match=r"not made of blocks; set pressure\.swap_gib: 0"):
            HostBlocks([cache], BLOCKS, SLOTS)
