"""As much of a worker of either tier as has to do with vLLM's first model runner."""

from types import SimpleNamespace

from sampling.worker import CarryingWorker


class _StockWorker:
    """As much of vLLM's as is called."""

    def initialize_from_config(self, kv_cache_config):
        pass


class _Worker(CarryingWorker, _StockWorker):
    def __init__(self, batch, sampler):
        model = SimpleNamespace(use_fp64_gumbel=False)
        self.vllm_config = SimpleNamespace(use_v2_model_runner=False, model_config=model)
        self.model_runner = SimpleNamespace(
            input_batch=batch, requests={}, sampler=sampler, device=batch.device
        )


def take_over(batch, sampler):
    """Have a worker start with these; what it makes of the batch and the sampler lies in them."""
    _Worker(batch, sampler).initialize_from_config(None)
