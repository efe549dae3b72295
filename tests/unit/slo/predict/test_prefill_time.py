"""A fit finds the line and the curve that it was given, and what it predicts of passes holds together."""

import json
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.predict.pass_shape import PassPart
from slo.predict.prefill_time import SHARED_TOKENS, PrefillPredictor, Sample, attention_pairs, fit


def test_fit_finds_the_line_it_was_given():
    line = PrefillPredictor(per_token_s=0.0002, fixed_s=0.03)
    result = fit([Sample(n, line.prefill_s(n)) for n in (10, 500, 4000)])
    assert result.predictor.per_token_s == pytest.approx(0.0002)
    assert result.predictor.fixed_s == pytest.approx(0.03)
    assert result.r_squared == pytest.approx(1.0)
    assert result.mape == pytest.approx(0.0, abs=1e-9)


def test_the_quality_of_a_fit_is_of_measured_minus_predicted():
    result = fit([Sample(1, 1.0), Sample(1, 3.0), Sample(2, 4.0), Sample(2, 4.0)])
    predict = result.predictor.prefill_s
    expected = (1.0 - predict(1), 3.0 - predict(1), 4.0 - predict(2), 4.0 - predict(2))
    assert result.mape == pytest.approx(
        sum(abs(r) / t for r, t in zip(expected, (1.0, 3.0, 4.0, 4.0), strict=True)) / 4
    )
    assert 0 < result.r_squared < 1


def test_fit_finds_the_curve_it_was_given_behind_cached_prefixes_too():
    curve = PrefillPredictor(per_token_s=7e-5, fixed_s=0.003, per_pair_s=2e-9)
    lengths = ((32, 0), (512, 0), (4096, 0), (32_768, 0), (64, 30_000), (2048, 8192))
    result = fit([Sample(n, curve.prefill_s(n, behind), behind) for n, behind in lengths])
    assert result.predictor.per_token_s == pytest.approx(curve.per_token_s)
    assert result.predictor.per_pair_s == pytest.approx(curve.per_pair_s)
    assert result.predictor.prefill_s(100_000, 20_000) == pytest.approx(curve.prefill_s(100_000, 20_000))


def test_a_measurement_that_was_held_up_does_not_bend_the_curve():
    curve = PrefillPredictor(per_token_s=0.0002, fixed_s=0.03)
    samples = [Sample(n, curve.prefill_s(n)) for n in (32, 512, 2048) for _ in range(3)]
    samples[4] = Sample(512, 20.0)
    result = fit(samples)
    assert result.predictor.prefill_s(1000) == pytest.approx(curve.prefill_s(1000))
    assert result.mape == pytest.approx((20.0 - curve.prefill_s(512)) / 20.0 / len(samples))
    assert result.mape > 0.1


def test_two_lengths_give_a_line_and_no_curve():
    result = fit([Sample(10, 1.0), Sample(100, 5.0)])
    assert result.predictor.per_pair_s == 0.0
    assert result.mape == pytest.approx(0.0, abs=1e-9)


def test_short_prompts_cannot_make_attention_cheaper_than_its_work():
    """A warm-up says next to nothing of attention; at 100,000 tokens it is most of what a prefill takes."""
    pair_work = 1 / 15_000
    line = PrefillPredictor(per_token_s=7e-5, fixed_s=0.003)
    short = [Sample(n, line.prefill_s(n)) for n in (32, 256, 1024)]
    assert fit(short).predictor.per_pair_s == pytest.approx(0.0, abs=1e-12)
    found = fit(short, pair_work=pair_work).predictor
    assert found.per_pair_s == pytest.approx(pair_work * found.per_token_s)
    assert found.prefill_s(1024) == pytest.approx(line.prefill_s(1024), rel=0.02)
    assert found.prefill_s(100_000) > 3 * line.prefill_s(100_000)


def test_attention_that_takes_longer_than_its_work_is_found_as_it_is():
    curve = PrefillPredictor(per_token_s=7e-5, fixed_s=0.003, per_pair_s=2e-8)
    found = fit([Sample(n, curve.prefill_s(n)) for n in (32, 2048, 32_768)], pair_work=1 / 15_000).predictor
    assert found.per_pair_s == pytest.approx(curve.per_pair_s)
    assert found.per_token_s == pytest.approx(curve.per_token_s)


def test_what_is_done_of_a_pass_depends_on_what_it_computes():
    curve = PrefillPredictor(per_token_s=1.0, fixed_s=0.0, per_pair_s=1.0)
    half_of_attention = PassPart(tokens=1.0, pairs=0.5)
    assert curve.fraction(half_of_attention, 10, 10.0) == pytest.approx(0.75)
    assert curve.fraction(half_of_attention, 10, 90.0) == pytest.approx(0.55)
    assert curve.part_s(half_of_attention, 10, 90.0) == pytest.approx(55.0)
    assert PrefillPredictor(0.0, 0.0).fraction(PassPart(0.3, 0.1), 10, 90.0) == 0.3, "nothing is known"


@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 4000)), min_size=1, max_size=6),
    st.floats(0, 1e-3),
    st.floats(0, 1e-6),
)
def test_a_pass_of_several_costs_their_work_and_one_fixed_part(members, per_token_s, per_pair_s):
    curve = PrefillPredictor(per_token_s, 0.01, per_pair_s=per_pair_s)
    pairs = sum(attention_pairs(n, behind) for n, behind in members)
    whole_s = curve.pass_s(sum(n for n, _ in members), pairs)
    parts_s = sum(curve.prefill_s(n, behind) for n, behind in members)
    assert whole_s == pytest.approx(parts_s - 0.01 * (len(members) - 1))
    assert curve.times(2.0).prefill_s(100, 7) == pytest.approx(2 * curve.prefill_s(100, 7))


@pytest.mark.parametrize(
    "samples", [[], [Sample(5, 1.0)], [Sample(5, 1.0), Sample(5, 2.0)], [Sample(5, 1.0), Sample(6, 0.0)]]
)
def test_too_little_to_fit_is_refused(samples):
    with pytest.raises(ValueError, match=r"different prompt lengths|positive"):
        fit(samples)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-4, 100)), min_size=2, max_size=30))
def test_no_measurement_makes_time_run_backwards(points):
    samples = [Sample(n, s) for n, s in points]
    if len({n for n, _ in points}) < 2:
        return
    predictor = fit(samples).predictor
    assert predictor.per_token_s >= 0
    assert predictor.fixed_s >= 0
    assert predictor.prefill_s(10) <= predictor.prefill_s(20)


H100 = json.loads((Path(__file__).parents[4] / "benchmarks/results/gpu/profile.json").read_text())["samples"]
"""Eager passes of Llama 3 8B on an H100."""
TOKENS = sorted({sample["tokens"] for sample in H100})
PAIR_WORK = 3.7e-5
WARM_UP_OF_GPUS = (64, 512, 2048, 8192)


def measured_s(tokens):
    return [sample["measured_s"] for sample in H100 if sample["tokens"] == tokens]


@pytest.mark.parametrize(
    ("lengths", "within"),
    [(WARM_UP_OF_GPUS, 0.12), ((64, 512, 1023), 0.2), ((32, 256, 1024), 0.2), (TOKENS, 0.12)],
)
@pytest.mark.parametrize("pair_work", [PAIR_WORK, 0.0])
def test_on_a_gpu_short_passes_all_take_the_same_and_long_ones_what_is_measured(lengths, within, pair_work):
    """The line through short ones has no slope: 8,192 tokens would be promised in 44 ms, and take 248."""
    samples = [
        Sample(n, min(measured_s(max(n, TOKENS[0]) if n < 1000 else n // 1000 * 1024))) for n in lengths
    ]
    predictor = fit(samples, pair_work=pair_work, has_floor=True).predictor
    off = {tokens: predictor.prefill_s(tokens) / median(measured_s(tokens)) - 1 for tokens in TOKENS}
    assert max(map(abs, off.values())) < within, off


@given(
    st.floats(0.005, 0.1),
    st.floats(1e-6, 1e-3),
    st.floats(1.0, 4.0),
    st.lists(st.sampled_from([32, 64, 256, 512, 1024, 2048, 8192]), min_size=2, unique=True),
)
def test_a_longer_prompt_is_never_promised_in_the_time_of_a_short_one(floor_s, per_token_s, work, lengths):
    truth = PrefillPredictor(per_token_s, 0.0, per_pair_s=work * PAIR_WORK * per_token_s, floor_s=floor_s)
    samples = [Sample(tokens, truth.prefill_s(tokens)) for tokens in lengths]
    found = fit(samples, pair_work=PAIR_WORK, has_floor=True).predictor
    assert found.prefill_s(100_000) > 5 * found.prefill_s(max(lengths))
    for tokens in lengths:
        assert found.prefill_s(tokens) == pytest.approx(truth.prefill_s(tokens), rel=0.25)


def test_no_pass_takes_less_than_the_floor_and_several_share_it():
    line = PrefillPredictor(per_token_s=3e-5, fixed_s=0.0, per_pair_s=1e-9, floor_s=0.03)
    assert line.prefill_s(64) == line.pass_s(4 * 64, 4 * attention_pairs(64)) == 0.03
    assert line.prefill_s(8192) == pytest.approx(3e-5 * 8192 + 1e-9 * 8192**2 / 2)
    assert sum(line.kinds_s(64, attention_pairs(64))) == pytest.approx(0.03)
    assert line.times(2).prefill_s(64) == 0.06
    assert PrefillPredictor.decode(line.encode()) == line
    assert line.prefill_s(0) == 0.0


@given(st.integers(1, 20_000), st.integers(0, 50_000), st.floats(0.0, 0.2))
def test_what_a_prompt_adds_to_a_pass_is_its_line_or_its_part_of_a_full_pass(tokens, context, floor_s):
    line = PrefillPredictor(per_token_s=2e-5, fixed_s=0.0, per_pair_s=1e-9, floor_s=floor_s)
    alone_s, idle_s = line.prefill_s(tokens, context), line.idle_s(tokens, context)
    own_s = PrefillPredictor(2e-5, 0.0, per_pair_s=1e-9).prefill_s(tokens, context)
    assert own_s - 1e-12 <= alone_s - idle_s <= alone_s
    if floor_s == 0 or tokens >= SHARED_TOKENS:
        assert idle_s == pytest.approx(0.0, abs=1e-12)
    count = SHARED_TOKENS // tokens
    if count and not context:
        passed_s = line.pass_s(count * tokens, count * attention_pairs(tokens))
        assert count * (alone_s - idle_s) >= passed_s * count * tokens / SHARED_TOKENS - 1e-9


def test_nothing_takes_no_time():
    assert PrefillPredictor(0.1, 0.5).prefill_s(0) == 0.0
