"""Passes that were measured correct the prediction, and those that were held up hardly do."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.predict.pass_time import LearnedPasses
from slo.predict.prefill_time import PrefillPredictor, attention_pairs

WARM_UP = PrefillPredictor(per_token_s=0.002, fixed_s=0.12, handoff_s=0.03, per_pair_s=1e-7)
"""More is fixed than a pass has: what is around the pass is in it."""
TRUTH = PrefillPredictor(per_token_s=0.0024, fixed_s=0.02, per_pair_s=1.2e-7)
ANCHORS = (32, 256, 1024)


def run(passes, lengths, noise=0.0, seed=1, truth=TRUTH):
    rng = random.Random(seed)
    for _ in range(passes):
        tokens = rng.choice(lengths)
        seconds = truth.prefill_s(tokens) * (1 + rng.uniform(-noise, noise))
        yield tokens, attention_pairs(tokens), seconds


def off(predictor, tokens, truth=TRUTH):
    return abs(predictor.prefill_s(tokens) / truth.prefill_s(tokens) - 1)


def learned(passes):
    times = LearnedPasses(WARM_UP, ANCHORS)
    for measured in passes:
        times.add(*measured)
    return times.predictor


def test_before_the_first_pass_the_warm_up_holds():
    assert LearnedPasses(WARM_UP, ANCHORS).predictor == WARM_UP


def test_fixed_and_linear_part_are_corrected_apart():
    lengths = (64, 100, 700, 2000)
    assert max(off(WARM_UP, tokens) for tokens in lengths) > 0.3
    found = learned(run(60, lengths, noise=0.05))
    assert max(off(found, tokens) for tokens in lengths) < 0.05
    assert found.handoff_s == WARM_UP.handoff_s


def test_a_few_passes_are_enough_for_their_own_lengths():
    assert off(learned(run(6, (64,))), 64) < 0.15 < off(WARM_UP, 64)


def test_passes_of_one_length_do_not_say_which_part_is_off():
    found = learned(run(64, (64,)))
    assert off(found, 64) < 0.03
    all_is_faster = TRUTH.prefill_s(64) / WARM_UP.prefill_s(64)
    assert off(WARM_UP, 1024) < off(found, 1024) < off(WARM_UP.times(all_is_faster), 1024) - 0.05


def test_passes_that_were_held_up_count_little():
    passes = [*run(60, (64, 700, 2000), noise=0.03)]
    held_up = [
        (tokens, pairs, seconds * (6 if number % 10 == 3 else 1))
        for number, (tokens, pairs, seconds) in enumerate(passes)
    ]
    assert max(off(learned(held_up), tokens) for tokens in (64, 700, 2000)) < 0.06


def test_a_replica_that_has_become_slower_is_followed():
    times = LearnedPasses(WARM_UP, ANCHORS)
    for measured in (*run(100, (64, 700, 2000)), *run(100, (64, 700, 2000), truth=TRUTH.times(1.5))):
        times.add(*measured)
    assert off(times.predictor, 700, TRUTH.times(1.5)) < 0.03


@pytest.mark.parametrize("factor", [0.4, 0.7, 1.4, 2.5])
def test_a_replica_that_has_changed_is_followed_within_a_few_passes(factor):
    """Those from before count no more."""
    times, changed = LearnedPasses(WARM_UP, ANCHORS), TRUTH.times(factor)
    for measured in (*run(100, (64, 700, 2000), 0.05), *run(10, (64, 700), 0.05, truth=changed)):
        times.add(*measured)
    assert max(off(times.predictor, tokens, changed) for tokens in (64, 700)) < 0.06
    assert off(times.predictor, 2000, changed) < 0.1, "those of other lengths have changed alike"


def test_passes_of_one_length_that_fit_badly_do_not_spoil_the_others_for_long():
    """As the chunks of a long prompt, all of one length that takes a third longer than the line says."""
    times, odd = LearnedPasses(WARM_UP, ANCHORS), TRUTH.times(1.35)
    for _ in range(4):
        for measured in (*run(30, (64, 700, 2000), 0.03), *run(8, (512,), truth=odd)):
            times.add(*measured)
    for measured in run(12, (64, 700, 2000), 0.03, seed=2):
        times.add(*measured)
    assert max(off(times.predictor, tokens) for tokens in (64, 700, 2000)) < 0.12


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.floats(0, 1e7), st.floats(0, 100, allow_subnormal=False)),
        max_size=40,
    ),
    st.sampled_from([WARM_UP, PrefillPredictor(0.0, 0.0), PrefillPredictor(0.001, 0.0)]),
)
def test_no_prediction_is_negative_whatever_was_measured(passes, prior):
    times = LearnedPasses(prior, ANCHORS)
    for measured in passes:
        times.add(*measured)
    assert 0 <= times.predictor.fixed_s < float("inf")
    assert 0 <= times.predictor.prefill_s(1) <= times.predictor.prefill_s(10_000) < float("inf")


def test_a_prior_without_anchors_learns_too():
    times = LearnedPasses(WARM_UP, ())
    times.add(64, attention_pairs(64), 0.2)
    assert times.predictor.prefill_s(64) == pytest.approx(0.2)


ON_GPU = PrefillPredictor(per_token_s=3.2e-5, fixed_s=0.0, per_pair_s=1.2e-9, floor_s=0.045)
ON_THAT_GPU = PrefillPredictor(per_token_s=2.7e-5, fixed_s=0.0, per_pair_s=1e-9, floor_s=0.03)


def test_above_a_floor_floor_and_line_are_corrected_apart():
    times, lengths = LearnedPasses(ON_GPU, (64, 2048, 8192)), (64, 300, 1000, 2048, 8192)
    for measured in run(60, lengths, noise=0.05, truth=ON_THAT_GPU):
        times.add(*measured)
    found = times.predictor
    assert max(off(found, tokens, ON_THAT_GPU) for tokens in lengths) < 0.06 < off(ON_GPU, 64, ON_THAT_GPU)
    assert found.per_pair_s / found.per_token_s == pytest.approx(ON_GPU.per_pair_s / ON_GPU.per_token_s)


def test_short_passes_alone_do_not_make_long_ones_short():
    times = LearnedPasses(ON_GPU, (64, 2048, 8192))
    for measured in run(64, (64, 300), truth=ON_THAT_GPU):
        times.add(*measured)
    assert off(times.predictor, 64, ON_THAT_GPU) < 0.05
    assert off(times.predictor, 8192, ON_THAT_GPU) <= off(ON_GPU, 8192, ON_THAT_GPU)


@pytest.mark.parametrize("seed", range(10))
def test_short_passes_of_a_machine_that_others_share_do_not_make_long_ones_short(seed):
    """Its speed changes now by and by, and now at once: one changes what is fixed, the other all."""
    rng, speed = random.Random(seed), 1.0
    times = LearnedPasses(WARM_UP, ANCHORS)
    for _ in range(1500):
        speed = rng.choice([1, 1, 1.3, 2, 3]) if rng.random() < 1 / 30 else speed
        tokens, pairs = (count := rng.randint(1, 10)), attention_pairs(count)
        held_up = rng.choice([1, 1, 1, 2, 4]) if rng.random() < 0.2 else 1
        times.add(tokens, pairs, WARM_UP.pass_s(tokens, pairs) * speed * held_up * rng.uniform(0.8, 1.3))
        assert 0.45 < times.predictor.prefill_s(2048) / WARM_UP.prefill_s(2048) < 4.5
    for measured in run(64, (1, 10, 2048)):
        times.add(*measured)
    assert off(times.predictor, 2048) < 0.2, "long ones are learned all the same"


def test_a_line_that_was_far_too_flat_is_mended_by_long_passes():
    """As of a warm-up whose longest prompt still took the floor."""
    flat = PrefillPredictor(per_token_s=5e-6, fixed_s=0.0, per_pair_s=2e-10, floor_s=0.03)
    times = LearnedPasses(flat, (64, 1024))
    for measured in run(40, (64, 2048, 4096, 8192), noise=0.03, truth=ON_THAT_GPU):
        times.add(*measured)
    assert max(off(times.predictor, tokens, ON_THAT_GPU) for tokens in (64, 4096, 8192)) < 0.15
