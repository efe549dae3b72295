"""Penalties are what vLLM makes them, and what others have generated is not counted for them."""

import random

import pytest
import torch
from carrying_workers import take_over
from input_batches import VOCABULARY, input_batch
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

NONE = SamplingParams()
PENALTIES = [
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(presence_penalty=-1.3),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(frequency_penalty=1.1, presence_penalty=0.2, repetition_penalty=0.6),
]


def batch_of(dice, asked):
    batch = input_batch(len(asked))
    for number, params in enumerate(asked):
        prompt, answer = (dice.choices(range(VOCABULARY), k=dice.randrange(1, 12)) for _ in range(2))
        batch.add_request(CachedRequestState(str(number), prompt, [], params, None, ([0],), 0, answer))
    batch.refresh_metadata()
    return batch


def penalised(sampler, batch):
    metadata = batch.sampling_metadata
    logits = torch.randn(batch.num_reqs, VOCABULARY, generator=torch.Generator().manual_seed(1))
    return sampler.apply_penalties(logits, metadata, metadata.output_token_ids)


@pytest.mark.parametrize("seed", range(40))
def test_logits_are_vllms(seed):
    dice = random.Random(seed)
    batch = batch_of(dice, dice.choices([NONE, *PENALTIES], k=dice.randrange(1, 7)))
    if batch.num_reqs > 2:
        batch.remove_request("0")
        batch.condense()
        batch.refresh_metadata()
    sampler = Sampler()
    take_over(batch, sampler)
    assert torch.equal(penalised(sampler, batch), penalised(Sampler(), batch))


@pytest.mark.parametrize(("asked", "counted"), [([NONE, PENALTIES[0], NONE], [1]), ([NONE, NONE], [0, 1])])
def test_only_who_asks_is_counted(asked, counted):
    batch, sampler = batch_of(random.Random(0), asked), Sampler()
    answers, penalise = [], sampler.apply_penalties

    def watched(logits, metadata, output_token_ids):
        answers.extend(output_token_ids)
        return penalise(logits, metadata, output_token_ids)

    sampler.apply_penalties = watched
    take_over(batch, sampler)
    penalised(sampler, batch)
    expected = [batch.req_output_token_ids[row] for row in counted]
    assert answers == (expected if not batch.no_penalties else [])
