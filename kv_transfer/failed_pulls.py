"""Pulls that have failed, as vLLM's NIXL worker is told of them.

Owns five things that vLLM 0.29 gets wrong: a pull from several prefill ranks that has failed at one of them
is told while others are still being read, into blocks that are another request's by then; one that has failed
at several counts for each; of models with a sliding window no block is marked, so that what was not read
is answered from; what starting a pull raises ends the engine, as with MLA a prefill rank that is gone and
is to be told that another was read; and a pull may start before the ranks that a handshake has found are
noted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Container
from typing import Any, Final

from kv_transfer.cache_groups import NULL_BLOCK

_NOTED_S: Final = 0.0005
"""How long is waited at a time for a thread that only has to take a lock."""


class FailedPulls:
    """Takes the place of vLLM's queue of failed pulls: one is in it once nothing of it is read any more.

    Args:
        reading: The requests of which something is.
    """

    def __init__(self, reading: Container[str]) -> None:
        self._reading = reading
        self._failed: list[str] = []
        self._lock = threading.Lock()

    def put(self, request_id: str) -> None:
        """A pull has failed; threads that shake hands say so, too."""
        with self._lock:
            self._failed.append(request_id)

    def __contains__(self, request_id: str) -> bool:
        """Whether this one's pull has failed, which is still to be told."""
        with self._lock:
            return request_id in self._failed

    def empty(self) -> bool:
        """Whether there is none to be told now."""
        with self._lock:
            return all(request_id in self._reading for request_id in self._failed)

    def get_nowait(self) -> str:
        """Take one out.

        Raises:
            queue.Empty: There is none.
        """
        with self._lock:
            for place, request_id in enumerate(self._failed):
                if request_id not in self._reading:
                    return self._failed.pop(place)
        raise queue.Empty


def follow_failures(worker: Any, failed: Callable[[str], None]) -> None:
    """Put right how vLLM's worker notes failed pulls, and be told of each.

    Args:
        worker: VLLM's NIXL worker.
        failed: Called with the request of each; by threads of its own, too.
    """
    untold = worker._failed_recv_reqs = FailedPulls(worker._recving_transfers)  # noqa: SLF001 - vLLM's own
    handle_failed = worker._handle_failed_transfer  # noqa: SLF001 - likewise

    def handle(request_id: str, transfer: int | None) -> None:
        record = worker._recving_metadata.get(request_id)  # noqa: SLF001 - likewise
        blocks = set() if record is None else set().union(*record.local_block_ids)
        if record is not None and not blocks:  # a request that has ended: the scheduler does not know it
            worker._recving_metadata.pop(request_id, None)  # noqa: SLF001 - likewise
            worker.xfer_stats.record_failed_transfer()
            return
        if request_id in untold:  # of another rank: the request has failed once
            if transfer is not None:
                worker.nixl_wrapper.release_xfer_handle(transfer)
            return
        failed(request_id)
        if blocks:
            worker._invalid_block_ids.put(blocks - {NULL_BLOCK})  # noqa: SLF001 - likewise
        handle_failed(request_id, transfer)

    worker._handle_failed_transfer = handle  # noqa: SLF001 - likewise
    read_blocks = worker._read_blocks_for_req  # noqa: SLF001 - likewise

    def read(request_id: str, record: Any) -> None:
        while _is_being_noted(worker, record.remote.engine_id):
            time.sleep(_NOTED_S)
        try:
            read_blocks(request_id, record)
        except Exception as error:  # noqa: BLE001 - fails this pull only; it would end the engine's loop
            worker._log_failure(  # noqa: SLF001 - likewise
                failure_type="pull_not_started", req_id=request_id, error=error, meta=record
            )
            if request_id not in untold:
                handle(request_id, None)

    worker._read_blocks_for_req = read  # noqa: SLF001 - likewise


def _is_being_noted(worker: Any, engine: str) -> bool:
    """Whether a handshake has ended whose thread has yet to take the lock and note whom to notify."""
    with worker._handshake_lock:  # noqa: SLF001 - likewise
        handshake = worker._handshake_futures.get(engine)  # noqa: SLF001 - likewise
    return handshake is not None and handshake.done()
