"""What a decode replica's worker on a CPU is before its model is loaded."""

import torch
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from decode_node.worker.cpu import CarryingCPUWorker


def test_its_draft_tokens_are_sampled_with_their_requests_parameters(monkeypatch):
    """The model runner, which vLLM makes meanwhile, leaves a function there that gives them none."""
    monkeypatch.setattr(rejection_sampler, "expand_kernel", None)

    def make_model_runner(_):
        rejection_sampler.expand_kernel = cpu_triton_utils.expand_kernel

    monkeypatch.setattr(CPUWorker, "init_device", make_model_runner)
    object.__new__(CarryingCPUWorker).init_device()
    temperatures, ends = torch.tensor([0.8, 0.5]), torch.tensor([3, 5], dtype=torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 5)
    assert torch.equal(expanded, torch.tensor([0.8] * 3 + [0.5] * 2))
