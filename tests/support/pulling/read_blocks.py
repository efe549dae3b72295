"""A prefill worker's connector, without a network: which of its blocks have been read, and which were not."""

import queue
import time
from collections import defaultdict
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kv_transfer.connector import NixlConnector
from kv_transfer.leases import Pulls

LEASE_S = 30.0


class Worker(NixlPullConnectorWorker):
    """VLLM's own, as far as it leases blocks and is told by decode that it has read them."""

    def __init__(self):
        self.tp_rank, self.transfer_topo, self._lease_extension = 0, object(), LEASE_S
        self.arrived = []
        self.nixl_wrapper = SimpleNamespace(get_new_notifs=self._take)
        self._reqs_to_send, self._reqs_to_process = {}, set()
        self.consumer_notification_counts_by_req = defaultdict(int)
        self.expected_consumer_notifications_by_req = {}
        self._recving_metadata, self._recving_transfers = {}, {}
        self._failed_recv_reqs = queue.Queue()

    def __del__(self):
        pass

    def _take(self):
        arrived, self.arrived = self.arrived, []
        return {"decode": arrived}


class ReadBlocks(NixlConnector):
    """Ours, on such a worker."""

    def __init__(self):
        self.connector_worker = Worker()
        self.kv_transfer_config = SimpleNamespace(kv_role="kv_consumer")
        self._pulls = Pulls(None, {})
        self._read_by_all, self._ended_leases = set(), set()
        self._follow_notifications()

    def lease(self, request_id):
        """A prefill is done, and its blocks wait for decode."""
        self.connector_worker._reqs_to_process.add(request_id)
        self.connector_worker._reqs_to_send[request_id] = time.perf_counter() + LEASE_S

    def hear(self, *messages):
        """What decode, or whoever reaches NIXL's agent, has sent; the requests that are freed by it."""
        self.connector_worker.arrived += messages
        freed, _ = self.get_finished(set())
        return freed
