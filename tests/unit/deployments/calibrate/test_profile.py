"""A sweep finds what it measures, and a profile is read again, refused or checked."""

import json
import random

import pytest
from typer.testing import CliRunner

from deployments.calibrate.plan import default_lengths, handoff_lengths, lengths_to_check, prefixed
from deployments.calibrate.profile import (
    check_handoffs,
    check_prefills,
    load_profile,
    measure_handoffs,
    profile_of,
    save_profile,
    sweep,
    with_handoffs,
)
from deployments.cli import app
from deployments.config import ConfigError
from slo.files.profile import READABLE, read_profile
from slo.predict.handoff import HANDOFF_STEPS, HandoffSample, TransferFit
from slo.predict.measured_on import Subject
from slo.predict.prefill_time import PrefillPredictor

CURVE = PrefillPredictor(per_token_s=0.0002, fixed_s=0.03, per_pair_s=3e-8)
TRANSFER = TransferFit(latency_s=0.01, per_token_s=2e-6)
EMBEDDED = Subject("embedded", "cpu", 1, "float32")


def handed_over(tokens):
    return HandoffSample(tokens, 0.003, TRANSFER.transfer_s(tokens))


def profile(path, subject=EMBEDDED, **about):
    lengths = [32, 512, 2048]
    calibration = sweep(CURVE.prefill_s, lengths, 1, prefixed(lengths, 4096, 16))
    calibration = with_handoffs(calibration, measure_handoffs(handed_over, lengths, 1))
    told = {name: getattr(subject, name) for name in ("model", "accelerator", "tensor_parallel", "dtype")}
    save_profile(path, calibration, told | about, kv_bytes_per_token=4000)
    return path


def test_a_sweep_fits_what_it_measures_and_survives_the_file(tmp_path):
    calls = []

    def measure(tokens, _=0):
        calls.append(tokens)
        return 0.03 + 0.0002 * tokens

    calibration = sweep(measure, [32, 512, 2048], repeats=2)
    assert calls == [n for n in (32, 512, 2048) for _ in range(3)], "each length is warmed up once"
    assert calibration.fit.r_squared == pytest.approx(1.0)
    path = tmp_path / "deep" / "profile.json"
    save_profile(path, calibration, {"model": "tiny"})
    assert load_profile(path) == calibration.fit.predictor
    assert json.loads(path.read_text())["about"] == {"model": "tiny"}


class Disturbed:
    """A replica whose passes of these numbers take five times as long."""

    def __init__(self, disturbed):
        self.passes = 0
        self._disturbed = disturbed

    def prefill_s(self, tokens, context_tokens=0):
        self.passes += 1
        return CURVE.prefill_s(tokens, context_tokens) * (5 if self.passes in self._disturbed else 1)


def test_a_pass_that_the_machine_held_up_is_measured_again():
    replica = Disturbed({2, 6})  # the second pass of each length of the first two
    found = sweep(replica.prefill_s, [32, 512, 2048], repeats=2)
    assert replica.passes == 9 + 2
    assert found.fit.mape < 0.01
    assert found.fit.predictor.prefill_s(32) == pytest.approx(CURVE.prefill_s(32), rel=0.01)


def test_a_pass_that_a_check_was_held_up_in_is_measured_again():
    _, error = check_prefills(CURVE, Disturbed({2}).prefill_s, [(64, 0), (512, 128)])
    assert error.mape < 0.01


def test_a_machine_that_is_never_left_alone_shows_in_the_error_of_the_fit():
    replica = Disturbed({*range(100)} - {1, 7})  # only the unmeasured pass of each length was alone
    found = sweep(replica.prefill_s, [32, 512], repeats=2)
    assert replica.passes == 2 * (3 + 3), "it does not go on for ever"
    assert found.fit.predictor.prefill_s(512) > 4 * CURVE.prefill_s(512)


def test_a_sweep_behind_prefixes_finds_what_attention_takes():
    lengths = [32, 512, 2048]
    found = sweep(CURVE.prefill_s, lengths, 1, prefixed(lengths, 8192, 128))
    assert {sample.context_tokens for sample in found.samples} == {0, 512, 1024}
    assert found.fit.predictor.per_pair_s == pytest.approx(CURVE.per_pair_s)
    assert found.fit.predictor.prefill_s(100, 4000) == pytest.approx(CURVE.prefill_s(100, 4000))


def test_lengths_reach_the_models_context_and_prefixes_are_whole_blocks_within_it():
    assert default_lengths(4096) == (32, 128, 512, 2048, 4095)
    assert default_lengths(131_072) == (32, 128, 512, 2048, 8192, 32_768, 131_071)
    for length in (64, 100, 2048, 8192, 131_072):
        lengths = default_lengths(length)
        assert len(set(lengths)) >= 2
        pairs = prefixed(lengths, length, 128)
        assert all(context % 128 == 0 and context > 0 and context + new < length for new, context in pairs)
        handoffs = handoff_lengths(lengths, length)
        assert len(set(handoffs)) >= 2
        assert all(0 < tokens <= length - HANDOFF_STEPS for tokens in handoffs)
    assert prefixed((32, 4095), 4096, 0) == (), "nothing is cached"


def test_what_a_profile_holds_is_read_again(tmp_path):
    found = read_profile(profile(tmp_path / "p.json"), ConfigError)
    assert found.subject == EMBEDDED
    assert found.predictor.prefill_s(700, 300) == pytest.approx(CURVE.prefill_s(700, 300))
    assert found.predictor.handoff_s == pytest.approx(0.003)
    assert found.transfer is not None
    assert found.transfer.transfer_s(1000) == pytest.approx(TRANSFER.transfer_s(1000))
    link = found.link(found.kv_bytes_per_token)
    assert link is not None
    assert link.alone_s(4000 * 1000) == pytest.approx(0.01 + 0.002)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Subject("llama", "cpu", 1, "float32"), "model embedded is not llama"),
        (Subject("embedded", "H100", 1, "float32"), "accelerator cpu is not H100"),
        (Subject("embedded", "cpu", 2, "float32"), "tensor_parallel 1 is not 2"),
        (Subject("embedded", "cpu", 1, "bfloat16"), "dtype float32 is not bfloat16"),
        (Subject("llama", None, 4, None), "model embedded is not llama, tensor_parallel 1 is not 4"),
    ],
)
def test_a_profile_of_something_else_is_refused_by_name(tmp_path, other, message):
    with pytest.raises(ConfigError, match=message) as caught:
        profile_of(profile(tmp_path / "p.json"), other)
    assert "slackserve calibrate" in str(caught.value)


def test_a_profile_is_used_for_what_it_was_measured_on_and_for_what_is_not_known(tmp_path):
    path = profile(tmp_path / "p.json")
    assert profile_of(path, EMBEDDED).predictor == profile_of(path, Subject("embedded")).predictor


@pytest.mark.parametrize("number", READABLE)
def test_a_profile_may_have_prefill_times_only_and_be_of_anything(tmp_path, number):
    path = tmp_path / "short.json"
    predictor = {"per_token_s": 0.001, "fixed_s": 0.02}
    path.write_text(json.dumps({"format": number, "predictor": predictor}))
    found = profile_of(path, EMBEDDED)
    assert found.predictor == PrefillPredictor(0.001, 0.02)
    assert found.transfer is None
    assert found.link(100) is None


@pytest.mark.parametrize("number", [2, 5])
def test_a_profile_of_another_format_is_refused_by_its_number(tmp_path, number):
    path = tmp_path / "other.json"
    predictor = {"per_token_s": 0.001, "fixed_s": 0.02, "handoff_s": 0.05}
    path.write_text(json.dumps({"format": number, "about": {}, "predictor": predictor}))
    with pytest.raises(
        ConfigError, match=f"format {number}; this version reads 3 and 4; `slackserve calibrate`"
    ):
        load_profile(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 4}',
        '{"format": 4, "predictor": {"x": 1}}',
        '{"format": 99}',
        '{"format": 3, "predictor": {"per_token_s": 1, "fixed_s": 1}, "transfer": {"latency_s": 1}}',
    ],
)
def test_what_is_not_a_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="profile"):
        load_profile(path)


def test_a_missing_profile_says_how_to_write_one(tmp_path):
    with pytest.raises(ConfigError, match="slackserve calibrate"):
        load_profile(tmp_path / "none.json")


def test_a_check_says_how_far_a_profile_is_off():
    pairs = lengths_to_check(8192, 128, 12, seed=3)
    assert all(tokens >= 32 and tokens + context < 8192 and context % 128 == 0 for tokens, context in pairs)
    assert any(context for _, context in pairs)
    _, exact = check_prefills(CURVE, CURVE.prefill_s, pairs)
    assert exact.mape == pytest.approx(0.0)
    samples, off = check_prefills(CURVE.times(3.0), CURVE.prefill_s, pairs)
    assert len(samples) == off.samples == 12
    assert off.mape == pytest.approx(2.0)
    assert off.p90 == pytest.approx(2.0)
    noise = random.Random(1)
    noisy = check_prefills(CURVE, lambda n, c=0: CURVE.prefill_s(n, c) * noise.uniform(0.9, 1.1), pairs)[1]
    assert 0 < noisy.mape < noisy.p90 < 0.12
    assert check_handoffs(0.003, handed_over, [32, 512]).mape == pytest.approx(0.0)


def refusal(*arguments):
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert isinstance(result.exception, ConfigError)
    return str(result.exception)


@pytest.mark.parametrize("paths", [(), ("--output", "a.json", "--check", "b.json")])
def test_a_profile_is_either_written_or_tested(paths):
    assert "give --output, to write a profile, or --check, to test one" in refusal(*paths)


@pytest.mark.parametrize("lengths", ["64", "64,64", "0,5", "a,b", ""])
def test_lengths_that_make_no_line_are_refused_before_anybody_is_asked(lengths):
    assert "at least two different positive numbers" in refusal("--output", "a.json", "--lengths", lengths)
