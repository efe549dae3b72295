"""The worker of a decode replica on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from sampling.worker import CarryingWorker


class CarryingCPUWorker(CarryingWorker, CPUWorker):  # type: ignore[misc] # vLLM ships no types for it
    """`worker_cls` of a decode replica on a CPU."""
