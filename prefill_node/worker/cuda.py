"""The worker on an NVIDIA GPU."""

from vllm.v1.worker.gpu_worker import Worker

from prefill_node.worker.worker import PreemptibleWorker


class PreemptibleGPUWorker(PreemptibleWorker, Worker):  # type: ignore[misc] # vLLM ships no types for it
    """`worker_cls` of a prefill replica on a GPU."""
