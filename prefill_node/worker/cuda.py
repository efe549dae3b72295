"""The worker on an NVIDIA GPU."""

from vllm.v1.worker.gpu_worker import Worker

from engine_host.shared_gpu import TakesTurns
from prefill_node.worker.worker import PreemptibleWorker
from sampling.worker import CarryingWorker


class PreemptibleGPUWorker(TakesTurns, PreemptibleWorker, CarryingWorker, Worker):  # type: ignore[misc] # vLLM ships no types for it
    """`worker_cls` of a prefill replica on a GPU."""
