"""The worker of a decode replica on an NVIDIA GPU."""

from vllm.v1.worker.gpu_worker import Worker

from engine_host.shared_gpu import TakesTurns
from sampling.worker import CarryingWorker


class CarryingGPUWorker(TakesTurns, CarryingWorker, Worker):  # type: ignore[misc] # vLLM ships no types for it
    """`worker_cls` of a decode replica on a GPU."""
