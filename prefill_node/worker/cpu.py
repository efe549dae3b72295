"""The worker on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from prefill_node.worker.worker import PreemptibleWorker
from sampling.worker import CarryingWorker


class PreemptibleCPUWorker(PreemptibleWorker, CarryingWorker, CPUWorker):  # type: ignore[misc] # vLLM ships no types for it
    """`worker_cls` of a prefill replica on a CPU."""
