"""Chunks get shorter with the context, so that a step can always be stopped in time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cost.accelerators import A100, CHIPS, H100, MODELS, cost_model
from simulator.cost.passes import Granularity
from simulator.replica.hardware import Hardware
from slo.predict.pass_shape import PassPart
from slo.predict.prefill_time import PrefillPredictor, attention_pairs
from slo.queue.batching import STEP_TOKENS, Candidate, Step, StepLimit, compose_step
from slo.queue.chunks import GRAIN_TOKENS, StopBound, longest_s

PREDICTOR = PrefillPredictor(per_token_s=7e-5, fixed_s=0.005, per_pair_s=3.4e-9)
STRETCHES = (PassPart(0.016, 0.0), PassPart(0.0, 1 / 32))
BOUND = StopBound(0.008, STRETCHES)


def test_behind_a_long_context_attention_of_one_chunk_is_one_long_stretch():
    """The longest stretch of 8,192 tokens behind 128k is thirty times that of the same tokens alone."""
    alone = longest_s(STRETCHES, 8192, attention_pairs(8192), PREDICTOR)
    behind = longest_s(STRETCHES, 8192, attention_pairs(8192, 122_880), PREDICTOR)
    assert alone < 0.011
    assert behind > 0.1


@given(st.integers(0, 1_000_000))
def test_a_chunk_can_be_stopped_in_time_and_is_not_shorter_than_it_must_be(context):
    tokens = int(min(BOUND.chunk_tokens(context, PREDICTOR), STEP_TOKENS))
    if tokens > GRAIN_TOKENS:
        assert BOUND.is_kept(tokens, attention_pairs(tokens, context), PREDICTOR)
    if tokens < STEP_TOKENS:
        longer = tokens + GRAIN_TOKENS
        assert not BOUND.is_kept(longer, attention_pairs(longer, context), PREDICTOR)


def test_chunks_shrink_with_the_context_to_a_tile_of_rows():
    sizes = [BOUND.chunk_tokens(context, PREDICTOR) for context in range(0, 4_000_000, 50_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == GRAIN_TOKENS
    assert all(size % GRAIN_TOKENS == 0 for size in sizes)


@pytest.mark.parametrize(
    ("bound", "predictor"),
    [
        (StopBound(math.inf, STRETCHES), PREDICTOR),
        (StopBound(0.008, ()), PREDICTOR),
        (BOUND, PrefillPredictor(0.0, 0.0)),
    ],
)
def test_without_a_bound_or_a_prediction_a_chunk_may_have_any_length(bound, predictor):
    assert bound.chunk_tokens(100_000, predictor) == math.inf


def test_what_is_fixed_alone_takes_too_long_and_chunks_are_as_short_as_they_get():
    assert BOUND.chunk_tokens(0, PrefillPredictor(1e-5, 1.0)) == GRAIN_TOKENS


def test_it_travels_with_a_request():
    assert StopBound.of(BOUND.encode()) == BOUND


def test_nobody_joins_a_step_that_could_not_be_stopped_in_time_then():
    behind = [Candidate(512, math.inf, attention_pairs(512, 120_000)) for _ in range(2)]
    assert compose_step(behind, 0.0, PREDICTOR, 2048) == Step(2, StepLimit.QUEUE_EMPTY)
    assert compose_step(behind, 0.0, PREDICTOR, 2048, BOUND) == Step(1, StepLimit.STOP)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("model", "ranks"), [("llama-3-8b", 1), ("llama-3-70b", 4)])
@pytest.mark.parametrize("granularity", [Granularity.REPLAYED, Granularity.COMPILED, Granularity.OPERATOR])
@pytest.mark.parametrize("context", [0, 8192, 32_768, 122_880])
def test_on_the_accelerators_models_the_longest_stretch_of_a_chunk_is_within_the_bound(
    chip, model, ranks, granularity, context
):
    """By the times of the operators themselves, not by what is predicted of them."""
    hardware = Hardware(cost_model(MODELS[model], CHIPS[chip], ranks))
    cost = hardware.at(granularity)
    bound = StopBound(0.008, cost.shape_of_passes().stretches())
    tokens = int(min(STEP_TOKENS, bound.chunk_tokens(context, hardware.predictor())))
    times = cost.times([(tokens, context)])
    parts = [end - start for start, end in zip((0.0, *times.ends), times.ends, strict=False)]
    assert max(parts) < 0.0088
    assert tokens >= 384


def test_a_faster_accelerator_has_longer_chunks():
    sizes = []
    for chip in (A100, H100):
        hardware = Hardware(cost_model(MODELS["llama-3-8b"], chip, 1))
        stretches = hardware.at(Granularity.REPLAYED).shape_of_passes().stretches()
        sizes.append(StopBound(0.008, stretches).chunk_tokens(122_880, hardware.predictor()))
    assert sizes[0] < sizes[1] < STEP_TOKENS
