"""The NIXL connector that both tiers load, and its configuration.

Owns what SlackServe needs beyond vLLM's own connector: a lease on finished prefill blocks can be ended
early, there is none where the answer has ended, what is read after its end is not used, an engine ends with
its replica, its side channel outlives what strangers send, a decode engine can move blocks to host memory and
back, and on CPU the transfer leaves the engine its cores. The transfer itself is vLLM's.
"""

from __future__ import annotations

import enum
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from kv_transfer.cache_groups import refuse_several_groups
from kv_transfer.empty_pulls import EmptyPulls
from kv_transfer.failed_pulls import follow_failures
from kv_transfer.leases import EndedBook, EndedLeases, Leases, Pull, Pulls
from kv_transfer.nixl_agent import sleeping_progress_threads
from kv_transfer.side_channel import ask_about_leases, probe, serve_handshakes
from kv_transfer.swap.book import SwapBook, SwapStep, pool_blocks
from kv_transfer.swap.host_blocks import HostBlocks, SwapSpeed
from telemetry.pressure import PRESSURE_KEY
from telemetry.pulls import PULLS_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

_SWAP_BYTES: Final = "slackserve_swap_bytes"
_OURS: Final = frozenset({PRESSURE_KEY, PULLS_KEY})
"""What of a step's statistics is not vLLM's."""
_ASKERS: Final = 4
_READ: Final = re.compile(r".*:[1-9][0-9]{0,8}", re.DOTALL)
"""What decode notifies: a request, and how many workers read its blocks."""
_HEARTBEAT: Final = "HB:"
_GRACE_S: Final = 10.0
"""How long a process whose parent has ended may take to stop its own children."""


class KVRole(enum.StrEnum):
    """A tier's side of the transfer, as vLLM calls it."""

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"


class NixlConnector(NixlPullConnector):  # type: ignore[misc] # vLLM ships no types for it
    """vLLM's pull connector with leases that end in the order of their expiry, and no reads after them.

    vLLM frees expired leases from the front of a dict that it takes to be sorted by expiry; a lease that a
    heartbeat lengthened or that `release` ended breaks that order, and would wait for all before it.
    The name is the one that Ray Serve LLM and vLLM know; vLLM takes the class from this module because the
    configuration gives `kv_connector_module_path`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as made:
            if role is KVConnectorRole.WORKER:
                made.enter_context(sleeping_progress_threads())
                if current_platform.is_cpu():
                    made.enter_context(transfer_threads_apart())
            super().__init__(vllm_config, role, *args, **kwargs)
        slots = swap_slots(vllm_config, self.kv_cache_config)
        self.swaps: SwapBook | None = None
        """On decode, where blocks may move to host memory."""
        if role is KVConnectorRole.WORKER:
            self._swap_slots = slots
            self._host_blocks: HostBlocks | None = None
            self._swap_speed: SwapSpeed | None = None
            worker = self.connector_worker
            self._pulls = Pulls(self._ask, worker._engine_clock_offset)  # noqa: SLF001 - vLLM's own
            self._empty_pulls = EmptyPulls()
            self._askers = ThreadPoolExecutor(_ASKERS, thread_name_prefix="leases")
            self._read_by_all: set[str] = set()
            self._ended_leases: set[str] = set()
            follow_failures(worker, self._pulls.failed)
            self._follow_notifications()
        if role is KVConnectorRole.SCHEDULER:  # in EngineCore, on both tiers
            end_with_parent()
            if vllm_config.kv_transfer_config.kv_role == KVRole.DECODE:
                refuse_several_groups(self.kv_cache_config)
            if slots:
                self.swaps = SwapBook(slots, vllm_config.cache_config.block_size)
            scheduler = self.connector_scheduler
            self._ended = EndedBook(scheduler.engine_id)
            scheduler._nixl_handshake_listener = partial(serve_handshakes, ended=self._ended.ended)  # noqa: SLF001 - started by vLLM

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """What vLLM's own loggers make of a step's statistics; ours, which travel along, are not theirs."""
        given = {name: value for name, value in (data or {}).items() if name not in _OURS}
        return super().build_kv_connector_stats(given or None)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Open the side channel, and see that it answers."""
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        scheduler = self.connector_scheduler
        probe(scheduler.side_channel_host, scheduler.side_channel_port, next(iter(metadata)))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens to pull beyond those computed here, and whether between steps.

        What is in host memory comes from there, within the step. vLLM's connector pulls the prompt. A request
        that goes on from several generated tokens is prefilled with all of them but the last, which the next
        step computes, and pulls them as well.
        """
        if self.swaps is not None and (held := self.swaps.tokens_of(request.request_id)):
            return max(0, held - num_computed_tokens), False
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and request.num_output_tokens > 1:
            ready = self.connector_scheduler._get_remote_prefill_token_count(request.num_tokens - 1)  # noqa: SLF001
            return max(0, ready - num_computed_tokens), ready > num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[no-any-return]

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """A request has got its blocks; what it has in host memory comes back into them."""
        if self.swaps is not None and self.swaps.tokens_of(request.request_id):
            self.swaps.give(request.request_id, blocks.get_block_ids()[0], num_external_tokens)
            return
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the workers are to do for the step, with the blocks that move."""
        step = super().build_connector_meta(scheduler_output)
        if self.swaps is not None:
            step.swaps = self.swaps.step()
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers say of a step."""
        super().update_connector_output(connector_output)
        match connector_output.kv_connector_worker_meta:
            case EndedLeases(leases):
                self._ended.note(leases)
            case SwapSpeed(block_s) if self.swaps is not None:
                self.swaps.block_s = block_s

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """On prefill: tell decode when the lease of the blocks ends, on the clock that handshakes tell.

        Nothing is leased of a prefill whose token has ended the answer: nobody will pull it.
        """
        if self.swaps is not None:
            self.swaps.forget(request.request_id)
        asked = request.kv_transfer_params or {}
        if asked.get("do_remote_decode") and request.status is RequestStatus.FINISHED_STOPPED:
            self.connector_scheduler._reqs_not_processed.add(request.request_id)  # noqa: SLF001 - as for an abort
            return False, None
        is_leased, address = super().request_finished_all_groups(request, block_ids)
        if is_leased and address is not None:
            leases = self.connector_scheduler._reqs_need_send  # noqa: SLF001 - vLLM tells only other prefills
            address["remote_blocks_expiry_time"] = leases[request.request_id]
        return is_leased, address

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take note of the engine's KV caches, and make the host's pool."""
        super().register_kv_caches(kv_caches)
        if self._swap_slots:
            self._host_blocks = HostBlocks(
                kv_caches.values(), self.kv_cache_config.num_blocks, self._swap_slots
            )
            self._swap_speed = self._host_blocks.measure()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before blocks are written to: move those out whose request has lost them."""
        if self._host_blocks is not None and (swaps := _swaps(kv_connector_metadata)) is not None:
            self._host_blocks.take(swaps.out)

    def build_connector_worker_meta(self) -> SwapSpeed | EndedLeases | None:
        """What the scheduler is told once: how long a block takes to host memory, which leases have ended.

        The first is decode's, the second prefill's.
        """
        if self._ended_leases:
            ended, self._ended_leases = EndedLeases(frozenset(self._ended_leases)), set()
            return ended
        speed, self._swap_speed = self._swap_speed, None
        return speed

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the step's transfers, then put the leases back into the order of their expiry."""
        if self._host_blocks is not None and (swaps := _swaps(self._connector_metadata)) is not None:
            self._host_blocks.give(swaps.back)
        self._note_leases()
        super().start_load_kv(forward_context, **kwargs)
        worker = self.connector_worker
        leases = worker._reqs_to_send  # noqa: SLF001 - vLLM has no other way to end a lease
        if _out_of_order(leases):
            worker._reqs_to_send = dict(sorted(leases.items(), key=lambda lease: lease[1]))  # noqa: SLF001

    def _note_leases(self) -> None:
        """On decode: what is asked of prefill with this step."""
        step, now_s = self._connector_metadata, time.perf_counter()
        self._empty_pulls.forget(self.connector_worker._recving_metadata, now_s)  # noqa: SLF001 - vLLM does not
        for request_id, pull in step.reqs_to_recv.items():
            peer, blocks = pull.remote, frozenset().union(*pull.local_block_ids)
            if not blocks:
                self._empty_pulls.asked(request_id, now_s)
            elif peer.blocks_expiry_time is not None:
                address = peer.host, peer.port
                self._pulls.began(
                    request_id,
                    Pull(peer.engine_id, address, peer.request_id, peer.blocks_expiry_time, blocks),
                    now_s,
                )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """What has been sent and received; blocks that were read after their lease are not used."""
        sent, received = super().get_finished(finished_req_ids)
        self._ended_leases |= sent - self._read_by_all
        self._read_by_all.clear()
        now_s = time.perf_counter()
        settled = self._pulls.settle(received, now_s, time.clock_gettime(time.CLOCK_BOOTTIME) - now_s)
        worker = self.connector_worker
        if settled.unusable:
            worker._invalid_block_ids.put(set(settled.unusable))  # noqa: SLF001 - as vLLM says that a pull failed
        for _ in range(settled.failed):
            worker.xfer_stats.record_failed_transfer()
        return sent, settled.done

    def _follow_notifications(self) -> None:
        """On prefill: take note of what has been read; of other blocks that are freed the lease has ended.

        What vLLM could not read is left out: it would raise within the engine's step, on decode as well.
        """
        worker = self.connector_worker
        agent = worker.nixl_wrapper
        new_notifications, received = worker._get_new_notifs, agent.get_new_notifs  # noqa: SLF001 - vLLM's own

        def readable() -> dict[str, list[bytes]]:
            return {sender: list(filter(_is_readable, sent)) for sender, sent in received().items()}

        def follow() -> set[str]:
            read: set[str] = new_notifications()
            self._read_by_all |= read
            return read

        worker._get_new_notifs = follow  # noqa: SLF001 - likewise
        agent.get_new_notifs = readable

    def _ask(self, pull: Pull, leases: Sequence[str]) -> Future[Leases]:
        return self._askers.submit(ask_about_leases, pull.address, pull.engine, leases)

    def release(self, engine_request_id: str) -> None:
        """Free a finished prefill's blocks at the next step although nobody has pulled them.

        For the scheduler's side, and only while the request's blocks wait to be pulled.
        """
        self.connector_scheduler._reqs_need_send[engine_request_id] = time.perf_counter()  # noqa: SLF001


def _is_readable(notification: bytes) -> bool:
    """Whether vLLM can read what NIXL has received."""
    try:
        text = notification.decode()
    except UnicodeDecodeError:
        text = ""
    if text.startswith(_HEARTBEAT) or _READ.fullmatch(text):
        return True
    _log.warning("NIXL: ignored a notification that nobody can read (%d bytes)", len(notification))
    return False


def _swaps(step: Any) -> SwapStep | None:
    return getattr(step, "swaps", None)


def swap_slots(vllm_config: VllmConfig, kv_cache: KVCacheConfig) -> int:
    """Blocks that the host's pool of each worker has room for; 0 where nothing is swapped.

    Nor is anything where vLLM zeroes blocks, which its second model runner does before they could be read.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if _SWAP_BYTES not in extra or kv_cache.needs_kv_cache_zeroing:
        return 0
    # Each tensor's size is that of the one allocation in which all of them lie.
    block_bytes = kv_cache.kv_cache_tensors[0].size // kv_cache.num_blocks
    ranks = vllm_config.parallel_config.world_size
    return pool_blocks(extra[_SWAP_BYTES], block_bytes, kv_cache.num_blocks, ranks)


def kv_transfer_config(
    role: KVRole, buffer_device: str, lease_s: int, *, swap_bytes: int | None = 0
) -> dict[str, Any]:
    """The `kv_transfer_config` engine argument of one tier.

    Args:
        role: Which side of the transfer the tier is on.
        buffer_device: Where NIXL reads and writes KV blocks, "cpu" or "cuda".
        lease_s: Seconds that finished prefill blocks wait for decode to pull them, lengthened by decode's
            heartbeats while the request queues there.
        swap_bytes: Host memory of a decode replica for streams that lose theirs; None for as much as
            `kv_transfer.swap.book.pool_blocks` takes, 0 for none.
    """
    swap = {} if swap_bytes == 0 else {_SWAP_BYTES: swap_bytes}
    return {
        "kv_connector": NixlConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": role.value,
        "kv_buffer_device": buffer_device,
        # Not `recompute`: that would run whole prompts among decode's tokens. The decode replica has the
        # prefill done again elsewhere.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s, **swap},
    }


def _out_of_order(leases: dict[str, float]) -> bool:
    expiries = list(leases.values())
    return any(later < earlier for earlier, later in pairwise(expiries))


def end_with_parent() -> None:
    """End this process when its parent ends: politely at first, so that it can stop its own children.

    vLLM's EngineCore does not notice when the process that started it is killed, and would hold its memory,
    its ports and its workers for ever. Does nothing in a process that multiprocessing has not started.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=follow, name="end-with-parent", daemon=True).start()


@contextmanager
def transfer_threads_apart() -> Iterator[None]:
    """Threads that start within run on the last core of those that this process' parent may use.

    vLLM's connector moves the thread that makes it, which is the one that computes, to the machine's last
    core, and NIXL's progress thread stays where that thread was. The calling thread
    is back on its own cores afterwards, wherever it was moved meanwhile.
    """
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(os.getppid()))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
