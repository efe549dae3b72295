"""The worker on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from prefill_node.worker.worker import PreemptibleWorker


class PreemptibleCPUWorker(PreemptibleWorker, CPUWorker):  # type: ignore[misc] # vLLM ships no types for it
    """`worker_cls` of a prefill replica on a CPU."""
