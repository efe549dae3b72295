"""The NIXL connector that both tiers load, and its configuration.

Owns what SlackServe needs beyond vLLM's own connector: a lease on finished prefill blocks can be given up
early, an engine ends with its replica, and on CPU the transfer leaves the engine its cores. The transfer
itself is vLLM's.
"""

from __future__ import annotations

import enum
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform

from kv_transfer.cores import transfer_threads_apart
from kv_transfer.engine_lifetime import end_with_parent
from kv_transfer.nixl_agent import sleeping_progress_threads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext


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
