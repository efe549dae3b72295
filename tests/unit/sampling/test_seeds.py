"""A draw can be taken back, and tokens that others have drawn are not drawn again."""

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from sampling import seeds
from sampling.seeds import Draw, take_up

CPU = torch.device("cpu")
VOCABULARY = 1000
WIDTHS = [torch.float32, torch.float64]
EMBEDDED = 49_152
"""Of the embedded model."""


def stock_generator(seed=7):
    return torch.Generator(CPU).manual_seed(seed)


def draw(generator, vocabulary=VOCABULARY, width=torch.float32):
    return torch.empty(vocabulary, dtype=width).exponential_(generator=generator)


def seeded(carried=0, vocabulary=VOCABULARY, seed=7, width=torch.float32):
    state = SimpleNamespace(generator=stock_generator(seed), sampling_params=SimpleNamespace(seed=seed))
    take_up(state, carried, Draw(vocabulary, width, CPU))
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
    take_up(state, 0, Draw(VOCABULARY, torch.float32, CPU))
    for _ in range(2):
        draw(state.generator)
        take_back(state.generator)
    assert torch.equal(draw(state.generator), draw(stock))


@pytest.mark.parametrize("carried", [1, 5, 32, 33, 1000])
def test_carried_tokens_are_skipped(carried):
    stock, state = stock_generator(), seeded(carried)
    for _ in range(carried):
        draw(stock)
    draw(state.generator)
    take_back(state.generator)
    assert torch.equal(draw(state.generator), draw(stock))


@pytest.mark.parametrize("vocabulary", [1, 7, 156, 312, 1000, 32_000, EMBEDDED, 151_936])
@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_skipped_is_what_would_have_been_drawn(vocabulary, seed, width):
    """To the bit, whatever came before: states as they are, not only the numbers that come next."""
    stock, carried = stock_generator(seed), 40
    for _ in range(carried):
        draw(stock, vocabulary, width)
    state = seeded(carried, vocabulary, seed, width)
    assert torch.equal(state.generator.get_state(), stock.get_state())
    take_up(state, carried, Draw(vocabulary, width, CPU))
    for _ in range(carried):
        draw(stock, vocabulary, width)
    assert torch.equal(draw(state.generator, vocabulary, width), draw(stock, vocabulary, width))


class Widths(TorchFunctionMode):
    """Notes how wide the numbers are that are drawn."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.exponential_:
            self.found.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_draw_is_as_wide_as_the_engines(width):
    """On a GPU a generator moves on by another number of outputs for wider ones."""
    with Widths() as widths:
        seeded(2, width=width)
    assert widths.found == [width] * 2


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_vllms_sampler_goes_on_as_after_its_own_draws(width):
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler, carried = TopKTopPSampler(use_fp64_gumbel=width is torch.float64), 40
    logits = torch.randn(2, EMBEDDED, generator=stock_generator(1))

    def sampled(generator):
        tokens, _ = sampler.forward_cpu(logits.clone(), {1: generator}, None, None)
        return int(tokens[1])

    stock = stock_generator()
    whole = [sampled(stock) for _ in range(carried + 5)]
    assert len(set(whole)) > carried // 2
    state = seeded(carried, EMBEDDED, width=width)
    assert [sampled(state.generator) for _ in range(5)] == whole[carried:]


@given(st.integers(1, 3000), st.integers(33, 400), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_any_number_of_draws_of_any_width_can_be_skipped(vocabulary, carried, seed):
    stock = stock_generator(seed)
    for _ in range(carried):
        draw(stock, vocabulary)
    assert torch.equal(seeded(carried, vocabulary, seed).generator.get_state(), stock.get_state())


@pytest.mark.parametrize("width", WIDTHS)
def test_a_draw_takes_as_many_outputs_on_this_machine_as_on_others(width):
    """Otherwise each is made: long streams that go on then stall the step."""
    assert seeds._outputs_of_a_draw(Draw(EMBEDDED, width, CPU)) == 2 * EMBEDDED


def test_long_streams_do_not_stall_the_step():
    """An engine that makes no progress for five seconds is killed, and eight may come at once."""
    seeded(33, EMBEDDED)
    started_s = time.process_time()
    for number in range(8):
        seeded(5500 + number, EMBEDDED)
    assert time.process_time() - started_s < 2.5


def test_where_nobody_knows_what_a_draw_takes_each_is_made(monkeypatch):
    stock = stock_generator()
    for _ in range(50):
        draw(stock)
    monkeypatch.setattr(seeds, "_outputs_of_a_draw", lambda kind: None)
    assert torch.equal(seeded(50).generator.get_state(), stock.get_state())


def test_without_a_seed_nothing_happens():
    state = SimpleNamespace(generator=None)
    take_up(state, 1, Draw(VOCABULARY, torch.float32, CPU))
    assert state.generator is None
