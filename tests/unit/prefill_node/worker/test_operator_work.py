"""The work of operators: of matrices per token, of attention per pair."""

import pytest
from torch import nn

from prefill_node.worker.operator_work import Work, work


class Attention(nn.Module):
    """What vLLM's attention is to those who read its sizes."""

    num_heads, head_size = 8, 16

    def __init__(self, sliding_window=None):
        super().__init__()
        self.sliding_window = sliding_window

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (Attention(), Work(per_pair=2 * 8 * 16)),
        (Attention(sliding_window=512), Work(per_token=2 * 8 * 16 * 512)),
    ],
    ids=["every token before it", "a window"],
)
def test_attention_is_two_products_for_each_key_that_it_looks_at(attention, expected):
    assert work(attention) == expected


def test_a_module_is_the_sum_of_its_parts():
    layer = nn.Sequential(nn.Linear(128, 384), Attention(), nn.Linear(128, 128), nn.SiLU())
    assert work(layer) == Work(per_token=4 * 128 * 128, per_pair=2 * 8 * 16)
    assert work(layer) - work(layer[1]) == Work(per_token=4 * 128 * 128)
