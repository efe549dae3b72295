"""Each request has the log-probabilities that it asks for, whatever others in vLLM's batch name."""

import pytest
import torch
from carrying_workers import take_over
from input_batches import input_batch
from vllm import SamplingParams
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

LOGITS = torch.tensor([[5.0, 1, 2, 9, 3, 4, 6, 7, 8, 0], [9.0, 1, 2, 5, 3, 4, 6, 7, 8, 0]])
NAMES = SamplingParams(temperature=0, logprob_token_ids=[9, 1])
HAS_TOP_THREE = SamplingParams(temperature=0, logprobs=3)


def batch_for(*asked):
    """A batch of these, as vLLM's first model runner keeps it."""
    batch = input_batch(2)
    for number, params in enumerate(asked):
        batch.add_request(CachedRequestState(str(number), [1, 2], [], params, None, ([0],), 0, []))
    batch.refresh_metadata()
    return batch


def sampler(mode="raw_logprobs"):
    made = Sampler(mode)
    take_over(batch_for(), made)
    return made


def given(made, *asked):
    """What each request finds in its row: vLLM reads as much of it as was asked for."""
    tensors = made(LOGITS[: len(asked)].clone(), batch_for(*asked).sampling_metadata).logprobs_tensors
    rows = zip(tensors.logprob_token_ids.tolist(), tensors.logprobs, strict=True)
    counts = [1 + params.num_logprobs for params in asked]
    return [(ids[:count], each[:count].tolist()) for (ids, each), count in zip(rows, counts, strict=True)]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("first", [NAMES, HAS_TOP_THREE, SamplingParams(temperature=0, logprobs=0)])
@pytest.mark.parametrize("second", [NAMES, HAS_TOP_THREE, SamplingParams(temperature=1, seed=1, logprobs=1)])
def test_each_has_what_it_has_alone(mode, first, second):
    made = sampler(mode)
    values = LOGITS if "logits" in mode else LOGITS.log_softmax(-1)
    together = given(made, first, second)
    for (ids, scores), params, row in zip(together, (first, second), values, strict=True):
        assert ids[1:] == (params.logprob_token_ids or row.topk(params.logprobs).indices.tolist())
        assert scores == row[ids].tolist()


def test_vllm_alone_gets_it_wrong():
    """When this fails, vLLM has been mended, and `sampling.named_logprobs` can go."""
    _, (ids, _) = given(Sampler(), NAMES, HAS_TOP_THREE)
    assert ids == [0, 0, 0]


@pytest.fixture
def on_a_cpu(monkeypatch):
    """As vLLM's model runner for CPUs leaves it."""
    kernel = cpu_triton_utils.rejection_greedy_sample_kernel
    monkeypatch.setattr(rejection_sampler, "rejection_greedy_sample_kernel", kernel)


def verified(made):
    """What two requests have of a draft token each, and of the next one; the first of them names tokens."""
    drafts = SpecDecodeMetadata.make_dummy([[3], [0]], torch.device("cpu"))
    drafts.target_logits_indices += torch.tensor([0, 2])
    drafts.bonus_logits_indices += torch.tensor([1, 3])
    logits, asked = LOGITS.repeat_interleave(2, dim=0), batch_for(NAMES, HAS_TOP_THREE).sampling_metadata
    return rejection_sampler.RejectionSampler(made)(drafts, None, logits, asked).logprobs_tensors


@pytest.mark.usefixtures("on_a_cpu")
def test_draft_tokens_are_verified_beside_named_ones():
    assert verified(sampler()).logprob_token_ids.tolist() == [[3, 3, 8, 7]] * 2 + [[0, 0, 8, 7]] * 2


@pytest.mark.usefixtures("on_a_cpu")
def test_vllm_alone_fails_to_verify_draft_tokens_beside_named_ones():
    """Likewise."""
    with pytest.raises(RuntimeError, match="shape mismatch"):
        verified(Sampler())
