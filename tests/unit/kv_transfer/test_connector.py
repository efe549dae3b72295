"""The thread that computes keeps its cores; what transfers gets the last one."""

import os
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch
from read_blocks import ReadBlocks
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheLayout,
    UniformTypeKVCacheSpecs,
)

from kv_transfer.connector import NixlConnector, swap_slots, transfer_threads_apart
from telemetry.pressure import PRESSURE_KEY
from telemetry.pulls import PULLS_KEY


@pytest.fixture
def on_one_core():
    """Run the test's thread on the first of the usable cores."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    yield {min(usable)}
    os.sched_setaffinity(0, usable)


def affinity_of_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_started_within_are_on_the_last_core_and_the_caller_is_back(on_one_core):
    with transfer_threads_apart():
        assert affinity_of_a_new_thread() == {max(psutil.Process(os.getppid()).cpu_affinity())}
    assert os.sched_getaffinity(0) == on_one_core


def test_wherever_the_caller_was_moved_it_is_back(on_one_core):
    def move():
        with transfer_threads_apart():
            os.sched_setaffinity(0, psutil.Process(os.getppid()).cpu_affinity())
            raise InterruptedError

    with pytest.raises(InterruptedError):
        move()
    assert os.sched_getaffinity(0) == on_one_core


def test_vllms_loggers_get_along_with_the_statistics_that_travel_with_the_transfers():
    nothing = NixlConnector.build_kv_connector_stats().data
    ours = {**nothing, PRESSURE_KEY: {"skipped": 3}, PULLS_KEY: 2}
    transfer = {name: [1] for name in nothing}
    total = NixlConnector.build_kv_connector_stats(ours)
    assert total.is_empty()
    for step in (ours, {**transfer, PRESSURE_KEY: {"skipped": 1}}, transfer):
        total = total.aggregate(NixlConnector.build_kv_connector_stats(step))
    assert total.data == {name: [1, 1] for name in nothing}


@pytest.mark.parametrize("kv_heads", [(8, 8), (8, 2), (8, 4, 2)])
def test_the_hosts_pool_has_the_memory_that_it_is_given(kv_heads):
    """However many sizes the layers' KV has, of which vLLM makes a tensor each."""
    sizes = {"block_size": 16, "head_size": 128, "dtype": torch.bfloat16}
    layers = {
        f"layer{at}": FullAttentionSpec(num_kv_heads=heads, **sizes) for at, heads in enumerate(kv_heads)
    }
    layout = next(layout for layout in KVCacheLayout if layout.is_block_outermost)
    given_bytes = 1 << 28
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=None,
        ),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"slackserve_swap_bytes": given_bytes}),
        parallel_config=SimpleNamespace(world_size=1),
    )
    group = KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs.from_specs(layers))
    kv_cache = get_kv_cache_config_from_groups(config, [group], 1 << 30)
    assert len(kv_cache.kv_cache_tensors) == len(set(kv_heads))
    block_bytes = sum(layer.page_size_bytes for layer in layers.values())
    assert swap_slots(config, kv_cache) == given_bytes // block_bytes


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"zz",
        b"\xff:1",
        b"HB:\xff",
        b"lease:y",
        b"lease:",
        b"lease:-1",
        b"lease:0",
        b"lease:1:",
        b"lease:" + b"9" * 5000,
    ],
)
def test_a_notification_that_nobody_can_read_ends_no_engine_and_keeps_back_no_other(message):
    """Whoever has NIXL's metadata of a worker can send it some; vLLM would raise within the engine's step."""
    connector = ReadBlocks()
    for lease in ("first", "second", "lease"):
        connector.lease(lease)
    assert connector.hear(b"first:1", message, b"second:1") == {"first", "second"}
    assert connector.hear(message) == set()
    assert connector.hear(b"lease:1") == {"lease"}


def test_a_lease_is_lengthened_and_several_readers_are_waited_for():
    connector = ReadBlocks()
    connector.lease("a:b")
    ends_s = connector.connector_worker._reqs_to_send["a:b"]
    assert connector.hear(b"HB:a:b,other", b"a:b:2") == set()
    assert connector.connector_worker._reqs_to_send["a:b"] > ends_s
    assert connector.hear(b"a:b:2") == {"a:b"}
