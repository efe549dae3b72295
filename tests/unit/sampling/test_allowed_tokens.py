"""Requests are held to the tokens that they have named, wherever they stand in vLLM's batch."""

import random

import pytest
import torch
from input_batches import VOCABULARY, input_batch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from sampling.allowed_tokens import keep_masks_right


class Batch:
    """A batch of vLLM's as its first model runner keeps it."""

    def __init__(self):
        self.requests = {}
        self.batch = input_batch(6)

    def add(self, name, allowed=None):
        params = SamplingParams(allowed_token_ids=allowed)
        state = CachedRequestState(name, [1, 2], [], params, None, ([0],), 0, [])
        self.requests[name] = state
        self.batch.add_request(state)

    def remove(self, name):
        self.batch.remove_request(name)
        del self.requests[name]

    def allowed(self, name):
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        row = (
            torch.zeros(VOCABULARY, dtype=torch.bool)
            if mask is None
            else mask[self.batch.req_id_to_index[name]]
        )
        return {token for token in range(VOCABULARY) if not row[token]}

    def is_right(self):
        return all(
            self.allowed(name) == set(state.sampling_params.allowed_token_ids or range(VOCABULARY))
            for name, state in self.requests.items()
        )


@pytest.fixture
def batch():
    made = Batch()
    keep_masks_right(made.batch, made.requests)
    return made


def move(made):
    """One that may generate anything comes where a restricted one has been."""
    made.add("a")
    made.add("b", [3])
    made.remove("a")
    made.batch.condense()
    made.add("c")


def swap(made):
    made.add("a", [4])
    made.add("b", [3])
    made.batch.swap_states(0, 1)


@pytest.mark.parametrize("happens", [move, swap])
def test_a_request_is_held_to_its_own_tokens(batch, happens):
    happens(batch)
    assert batch.is_right()


@pytest.mark.parametrize("happens", [move, swap])
def test_vllm_alone_gets_it_wrong(happens):
    """When this fails, vLLM has been mended, and `sampling.allowed_tokens` can go."""
    alone = Batch()
    happens(alone)
    assert not alone.is_right()


@pytest.mark.parametrize("seed", range(20))
def test_each_is_held_to_its_own_tokens_through_random_changes(batch, seed):
    dice = random.Random(seed)
    for number in range(60):
        names = [*batch.requests]
        if names and (len(names) == 6 or dice.random() < 0.4):
            batch.remove(dice.choice(names))
            batch.batch.condense()
        else:
            allowed = dice.sample(range(VOCABULARY), 3) if dice.random() < 0.5 else None
            batch.add(str(number), allowed)
        if len(batch.requests) > 1 and dice.random() < 0.3:
            batch.batch.swap_states(*dice.sample(range(len(batch.requests)), 2))
        batch.batch.refresh_metadata()
        assert batch.is_right()
