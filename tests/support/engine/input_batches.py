"""Batches as vLLM's first model runner keeps them, of a vocabulary of ten tokens."""

import torch
from vllm.v1.worker.gpu_input_batch import InputBatch

VOCABULARY = 10


def input_batch(requests):
    """An empty one for so many requests."""
    return InputBatch(
        max_num_reqs=requests,
        max_model_len=32,
        max_num_batched_tokens=32,
        device=torch.device("cpu"),
        vocab_size=VOCABULARY,
        block_sizes=[16],
        kernel_block_sizes=[16],
        max_num_blocks_per_req=[2],
    )
