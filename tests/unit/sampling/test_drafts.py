"""Draft tokens are sampled with the parameters of their requests."""

import pytest
import torch
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

from sampling.drafts import give_parameters


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """As vLLM's model runner for CPUs leaves it."""
    monkeypatch.setattr(rejection_sampler, "expand_kernel", cpu_triton_utils.expand_kernel)
    give_parameters()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0.8, 0.0, 0.5, 1.5], torch.float32),  # temperatures, of which a greedy one is replaced
        ([0.8, 0.0, 0.5, 1.5], torch.float64),
        ([20, 0, 5, 50], torch.int32),  # top_k
        ([20, 0, 5, 50], torch.int64),
    ],
)
def test_each_draft_token_has_its_requests(values, kind):
    given, ends = torch.tensor(values, dtype=kind), torch.tensor([3, 4, 4, 6], dtype=torch.int32)
    first, _, _, last = given.tolist()
    expected = torch.tensor([first] * 3 + [1] + [last] * 2, dtype=kind)
    expanded = rejection_sampler.expand_batch_to_tokens(given, ends, 6, replace_from=0, replace_to=1)
    assert torch.equal(expanded, expected)


def test_who_has_no_drafts_has_nothing():
    given, ends = torch.tensor([0.8, 0.5]), torch.tensor([0, 0], dtype=torch.int32)
    assert rejection_sampler.expand_batch_to_tokens(given, ends, 0).shape == (0,)
