"""A draw can be taken back, and tokens that others have drawn are not drawn again."""

from types import SimpleNamespace

import pytest
import torch

from sampling.seeds import take_up

CPU = torch.device("cpu")
VOCABULARY = 1000


def stock_generator():
    return torch.Generator(CPU).manual_seed(7)


def draw(generator):
    return torch.empty(VOCABULARY).exponential_(generator=generator)


def seeded(carried=0):
    state = SimpleNamespace(generator=stock_generator(), sampling_params=SimpleNamespace(seed=7))
    take_up(state, carried, VOCABULARY, CPU)
    return state


def take_back(generator):
    """As vLLM does."""
    generator.set_offset(generator.get_offset() - 4)


def test_stock_generators_on_cpu_cannot_do_it():
    with pytest.raises(RuntimeError, match="offset"):
        take_back(stock_generator())


def test_draws_for_chunks_are_taken_back():
    stock, state = stock_generator(), seeded()
    for _ in range(3):
        draw(state.generator)
        take_back(state.generator)
    for _ in range(5):
        assert torch.equal(draw(state.generator), draw(stock))


def test_draws_are_taken_back_to_where_the_request_was_taken_in_again():
    stock, state = stock_generator(), seeded()
    for _ in range(4):
        assert torch.equal(draw(state.generator), draw(stock))
    take_up(state, 0, VOCABULARY, CPU)
    for _ in range(2):
        draw(state.generator)
        take_back(state.generator)
    assert torch.equal(draw(state.generator), draw(stock))


@pytest.mark.parametrize("carried", [1, 5])
def test_carried_tokens_are_skipped(carried):
    stock, state = stock_generator(), seeded(carried)
    for _ in range(carried):
        draw(stock)
    draw(state.generator)
    take_back(state.generator)
    assert torch.equal(draw(state.generator), draw(stock))


def test_without_a_seed_nothing_happens():
    state = SimpleNamespace(generator=None)
    take_up(state, 1, VOCABULARY, CPU)
    assert state.generator is None
