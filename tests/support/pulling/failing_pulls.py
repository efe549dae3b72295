"""A decode engine's worker of whose pulls a test has one fail in part; vLLM's `worker_extension_cls`."""

from __future__ import annotations

from vllm.distributed.kv_transfer import get_kv_transfer_group


class FailingPulls:
    def fail_pull(self, group):
        """Of the next pull the first block of this group of KV caches is spoilt, and told to have failed."""
        connector = get_kv_transfer_group()
        worker = connector.connector_worker
        read, popped = worker._read_blocks_for_req, worker._pop_done_transfers

        def read_in_part(request_id, record):
            worker._read_blocks_for_req = read
            read(request_id, record)
            block = record.local_block_ids[group][0]

            def spoil(transfers):
                done = popped(transfers)
                if request_id in done:
                    worker._pop_done_transfers = popped
                    for cache in worker.device_kv_caches.values():
                        cache[block] = 1e3
                    worker._invalid_block_ids.put({block})
                return done

            worker._pop_done_transfers = spoil

        worker._read_blocks_for_req = read_in_part
