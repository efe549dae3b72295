"""VLLM's own worker, without a network: what it tells of pulls that have failed."""

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kv_transfer.failed_pulls import follow_failures


class Worker(NixlPullConnectorWorker):
    """As far as it notes what has become of pulls; `transfers` says how they are, by handle."""

    def __init__(self, transfers, *, has_windows=False):
        self.transfers = transfers
        self.counted, self.released = 0, []
        self._recving_metadata = {}
        self._recving_transfers = {}
        self._failed_recv_reqs, self._invalid_block_ids = queue.Queue(), queue.Queue()
        self._is_hma_required = has_windows
        self._reqs_to_send, self.engine_id, self.tp_rank, self.transfer_topo = {}, "decode", 0, object()
        self.use_host_buffer = self.enable_heterogeneous_attn_post_process = self._has_mamba = False
        self.xfer_stats = SimpleNamespace(record_failed_transfer=self._count)
        self.nixl_wrapper = SimpleNamespace(
            get_new_notifs=dict, check_xfer_state=transfers.get, release_xfer_handle=self.released.append
        )

    def __del__(self):
        pass

    def _count(self):
        self.counted += 1

    def pulls(self, request, blocks, *handles):
        self._recving_metadata[request] = SimpleNamespace(local_block_ids=blocks, remote=None)
        if handles:
            self._recving_transfers[request] = list(handles)


class Reader(Worker):
    """Also starts pulls, of one rank of an MLA model whose prefill has two; those in `gone` are no more."""

    def __init__(self, transfers, *, gone=()):
        super().__init__(transfers)
        self.gone, self.told = gone, []
        self.transfer_topo = TransferTopology(
            tp_rank=0,
            tp_size=1,
            block_size=16,
            engine_id="decode",
            is_mla=True,
            is_mamba=False,
            total_num_kv_heads=1,
            attn_backends=[],
        )
        self.transfer_topo._engines["prefill", 0] = SimpleNamespace(
            remote_tp_size=2, remote_dcp_size=1, remote_block_size=16, remote_physical_blocks_per_logical=1
        )
        self.tp_mappings = {"prefill": compute_tp_mapping(self.transfer_topo, 2, (MLAAttentionSpec,))}
        self.use_mla, self.dcp_size, self.pcp_rank = True, 1, 0
        self._bidirectional_kv_xfer_enabled, self._physical_blocks_per_logical_kv_block = False, 1
        self._logical_to_kernel_block_ids = lambda block_ids, _: block_ids
        self._compute_desc_ids = lambda block_ids, **_: block_ids[0]
        self.kv_cache_config = SimpleNamespace(transfer_groups=[1])
        self.src_xfer_handles_by_block_size = {16: 1}
        self.dst_xfer_side_handles = {"prefill": {0: 1, 1: 1}}
        self.dst_num_blocks = {"prefill": 10, "decode": 10}
        self._engine_last_active, self._ready_requests = {}, queue.Queue()
        self.agents = {(0, 0): "rank 0", (0, 1): "rank 1"}
        self._remote_agents = defaultdict(dict, prefill=self.agents)
        self._handshake_lock, self._handshake_futures = threading.RLock(), {}
        self._engine_clock_offset, self._engine_ttl = {}, 0
        self.nixl_wrapper.make_prepped_xfer = self._make
        self.nixl_wrapper.transfer = lambda _: "PROC"
        self.nixl_wrapper.send_notif = self._tell
        self.xfer_stats.record_failed_notification = lambda: None

    def _make(self, *_, **__):
        if "rank 0" in self.gone:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return "read"

    def _tell(self, agent, notif_msg):
        if agent in self.gone:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.told.append(agent)

    def starts(self, request, *blocks):
        """A step in which it is to pull these blocks."""
        step = NixlConnectorMetadata()
        remote = SimpleNamespace(
            engine_id="prefill", block_ids=([1, 2],), request_id="p", host="host", port=1
        )
        step.reqs_to_recv[request] = SimpleNamespace(
            local_block_ids=(list(blocks),),
            local_num_computed_blocks=(0,),
            remote=remote,
            tp_size=2,
            dcp_size=1,
            pp_size=1,
        )
        self.start_load_kv(step)


@pytest.fixture
def failed():
    return []


def worker(failed, of=Worker, **options):
    made = of(options.pop("transfers", {}), **options)
    follow_failures(made, failed.append)
    return made


def test_what_failed_at_one_rank_is_told_when_the_others_are_done(failed):
    """Its blocks are another request's as soon as it is told."""
    transfers = {"rank 0": "ERR", "rank 1": "PROC"}
    ours = worker(failed, transfers=transfers)
    ours.pulls("a", ([3, 4],), "rank 0", "rank 1")
    for _ in range(3):
        assert ours.get_finished() == (set(), set())
    assert ours.get_block_ids_with_load_errors() == {3, 4}, "the request need not wait"
    transfers["rank 1"] = "ERR"
    assert ours.get_finished() == (set(), {"a"})
    assert ours.get_finished() == (set(), set())
    assert (set(failed), ours.counted) == ({"a"}, 1)
    assert ours.released == ["rank 0", "rank 1"]


def test_others_that_failed_are_told_meanwhile(failed):
    ours = worker(failed, transfers={"0": "ERR", "1": "PROC", "2": "ERR"})
    ours.pulls("a", ([3],), "0", "1")
    ours.pulls("b", ([4],), "2")
    assert ours.get_finished() == (set(), {"b"})


@pytest.mark.parametrize("has_windows", [False, True])
def test_the_blocks_of_what_was_not_read_are_marked_whatever_the_attention(failed, has_windows):
    """The null block is in all tables."""
    ours = worker(failed, has_windows=has_windows)
    ours.pulls("a", ([0, 3, 4],) if has_windows else ([3, 4],))
    ours._handle_failed_transfer("a", None)
    assert ours.get_finished() == (set(), {"a"})
    assert ours.get_block_ids_with_load_errors() == {3, 4}
    assert (failed, ours.counted) == (["a"], 1)


@pytest.mark.parametrize("has_windows", [False, True])
def test_one_without_blocks_is_told_to_nobody(failed, has_windows):
    """Its request has ended, and vLLM's scheduler does not know it any more."""
    ours = worker(failed, has_windows=has_windows)
    ours.pulls("a", ([],))
    ours._handle_failed_transfer("a", None)
    assert ours.get_finished() == (set(), set())
    assert (ours._recving_metadata, failed, ours.counted) == ({}, [], 1)


def test_of_a_prefill_replica_that_is_gone_the_pull_fails_and_not_the_engine(failed):
    """Of an MLA model one rank is read; that the others cannot be told is vLLM's own exception."""
    ours = worker(failed, of=Reader, gone=["rank 0", "rank 1"])
    ours.starts("a", 3, 4)
    assert ours.get_block_ids_with_load_errors() == {3, 4}
    assert ours.get_finished() == (set(), {"a"})
    assert ours.get_finished() == (set(), set())
    assert (failed, ours.counted) == (["a"], 1)


def test_one_that_fails_when_a_rank_is_read_already_is_told_when_that_is_done(failed):
    transfers = {"read": "PROC"}
    ours = worker(failed, of=Reader, transfers=transfers, gone=["rank 1"])
    ours.starts("a", 3, 4)
    assert ours.get_finished() == (set(), set())
    transfers["read"] = "ERR"
    assert ours.get_finished() == (set(), {"a"})
    assert (failed, ours.counted, ours.released) == (["a"], 1, ["read"])


def test_a_pull_without_blocks_from_a_prefill_replica_that_is_gone_leaves_nothing(failed):
    ours = worker(failed, of=Reader, gone=["rank 0", "rank 1"])
    ours.starts("a")
    assert ours.get_finished() == (set(), set())
    assert (ours._recving_metadata, failed) == ({}, [])


def test_all_ranks_of_a_prefill_replica_that_is_there_are_told(failed):
    ours = worker(failed, of=Reader, transfers={"read": "PROC"})
    ours.starts("a", 3, 4)
    assert (ours._recving_transfers, ours.told, failed) == ({"a": ["read"]}, ["rank 1"], [])


class LateLock:
    """A lock that other threads than the first take after a while."""

    def __init__(self):
        self._lock, self._first = threading.RLock(), threading.get_ident()

    def __enter__(self):
        if threading.get_ident() != self._first:
            time.sleep(0.05)
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


@pytest.mark.parametrize("blocks", [(), (5, 6)])
def test_a_pull_that_is_asked_for_between_a_handshake_and_its_noting_tells_all_ranks(failed, blocks):
    ours = worker(failed, of=Reader, transfers={"read": "PROC"})
    ours._handshake_lock = LateLock()
    ours._remote_agents.clear()
    shaken, shake = threading.Event(), ours._background_nixl_handshake
    ours._nixl_handshake = lambda *_: (shaken.wait(), (ours.agents, 0.0))[1]

    def shake_again(*pull):
        shaken.set()
        ours._handshake_futures["prefill"].result()
        shake(*pull)

    with ThreadPoolExecutor(1) as ours._handshake_initiation_executor:
        ours.starts("first", 3, 4)
        ours._background_nixl_handshake = shake_again
        ours.starts("a", *blocks)
    ours.start_load_kv(NixlConnectorMetadata())
    assert (ours._recving_transfers["first"], failed, ours.counted) == (["read"], [], 0)
    assert sorted(ours.told) == (["rank 1", "rank 1"] if blocks else ["rank 0", "rank 1", "rank 1"])
