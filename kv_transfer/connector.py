"""The NIXL connector that both tiers load, and its configuration.

Owns what SlackServe needs beyond vLLM's own connector: a lease on finished prefill blocks can be ended
early, an engine ends with its replica, and on CPU the transfer leaves the engine its cores. The transfer
itself is vLLM's.
"""

from __future__ import annotations

import enum
import multiprocessing
import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform

from kv_transfer.nixl_agent import sleeping_progress_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext

_GRACE_S: Final = 10.0
"""How long a process whose parent has ended may take to stop its own children."""


class KVRole(enum.StrEnum):
    """A tier's side of the transfer, as vLLM calls it."""

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"


class NixlConnector(NixlPullConnector):  # type: ignore[misc] # vLLM ships no types for it
    """vLLM's pull connector with leases that end in the order of their expiry.

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
        if role is KVConnectorRole.SCHEDULER:  # in EngineCore, on both tiers
            end_with_parent()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the step's transfers, then put the leases back into the order of their expiry."""
        super().start_load_kv(forward_context, **kwargs)
        worker = self.connector_worker
        leases = worker._reqs_to_send  # noqa: SLF001 - vLLM has no other way to end a lease
        if _out_of_order(leases):
            worker._reqs_to_send = dict(sorted(leases.items(), key=lambda lease: lease[1]))  # noqa: SLF001

    def release(self, engine_request_id: str) -> None:
        """Free a finished prefill's blocks at the next step although nobody has pulled them.

        For the scheduler's side, and only while the request's blocks wait to be pulled.
        """
        self.connector_scheduler._reqs_need_send[engine_request_id] = time.perf_counter()  # noqa: SLF001


def kv_transfer_config(role: KVRole, buffer_device: str, lease_s: int) -> dict[str, Any]:
    """The `kv_transfer_config` engine argument of one tier.

    Args:
        role: Which side of the transfer the tier is on.
        buffer_device: Where NIXL reads and writes KV blocks, "cpu" or "cuda".
        lease_s: Seconds that finished prefill blocks wait for decode to pull them, lengthened by decode's
            heartbeats while the request queues there.
    """
    return {
        "kv_connector": NixlConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": role.value,
        "kv_buffer_device": buffer_device,
        # Not `recompute`: that would run whole prompts among decode's tokens. The decode replica has the
        # prefill done again elsewhere.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
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
