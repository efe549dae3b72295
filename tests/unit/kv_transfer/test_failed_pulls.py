"""VLLM's own worker, without a network: what it tells of pulls that have failed."""

import queue
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

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


@pytest.fixture
def failed():
    return []


def worker(failed, **options):
    made = Worker(options.pop("transfers", {}), **options)
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
