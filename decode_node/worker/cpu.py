"""The worker of a decode replica on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from sampling.drafts import give_parameters
from sampling.worker import CarryingWorker


class CarryingCPUWorker(CarryingWorker, CPUWorker):  # type: ignore[misc] # vLLM ships no types for it
    """`worker_cls` of a decode replica on a CPU."""

    def init_device(self) -> None:
        """Make the model runner, and mend what it samples draft tokens with."""
        super().init_device()
        give_parameters()
