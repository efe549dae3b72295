"""What `slackserve calibrate` asks of replicas, and in which order."""

import json
from types import SimpleNamespace

import pytest
from small_disk import small_disk
from typer.testing import CliRunner

from deployments.cli import app
from deployments.config import ConfigError
from deployments.local import running
from slo.predict.handoff import HANDOFF_STEPS, HandoffSample
from slo.predict.measured_on import Measurable, Subject


class Replicas:
    """Both tiers of a model of this length; a prompt has to leave room for its answer, as in vLLM."""

    def __init__(self, max_model_len, *, decodes=True):
        self.max_model_len = max_model_len
        self.asked = []
        self._decodes = decodes

    def measurable(self):
        return Measurable(Subject("tiny", "cpu", 1, "float32"), self.max_model_len, 128, 1000)

    def measure_prefill(self, tokens, context_tokens):
        self.asked.append(("prefill", tokens))
        self._check(context_tokens + tokens, 1)
        return 0.01 + 1e-4 * tokens + 1e-8 * tokens * (tokens / 2 + context_tokens)

    def measure_handoff(self, tokens):
        self.asked.append(("handoff", tokens))
        self._check(tokens, HANDOFF_STEPS if self._decodes else self.max_model_len)
        return HandoffSample(tokens, 0.003, 0.01 + 1e-6 * tokens)

    def _check(self, tokens, output_tokens):
        if tokens + output_tokens > self.max_model_len:
            raise RuntimeError(f"{tokens} and {output_tokens} are more than {self.max_model_len} tokens")


@pytest.fixture
def calibrate(monkeypatch, tmp_path):
    def run(replicas, *arguments, output=tmp_path / "profile.json"):
        def asking(name):
            def remote(*given):
                return SimpleNamespace(result=lambda: getattr(replicas, name)(*given))

            return SimpleNamespace(remote=remote)

        names = ("measurable", "measure_prefill", "measure_handoff")
        handle = SimpleNamespace(**{name: asking(name) for name in names})
        monkeypatch.setattr(running, "connect", lambda *_: SimpleNamespace(prefill=handle, decode=handle))
        ended = CliRunner().invoke(app, ["calibrate", *(arguments or ("--output", str(output)))])
        if ended.exception is not None:
            raise ended.exception
        return json.loads(output.read_text())

    return run


@pytest.mark.parametrize(
    ("max_model_len", "handoffs"),
    [(64, {32, 58}), (2048, {32, 512, 2042}), (4096, {32, 512, 4090}), (131_072, {32, 512, 4096})],
)
def test_a_model_of_any_length_is_measured_with_the_defaults(calibrate, max_model_len, handoffs):
    profile = calibrate(Replicas(max_model_len))
    assert max(sample["tokens"] for sample in profile["samples"]) == max_model_len - 1
    assert {sample["tokens"] for sample in profile["handoffs"]} == handoffs


def test_lengths_that_leave_no_room_for_an_answer_are_swept_and_handed_over_shorter(calibrate, tmp_path):
    output = tmp_path / "profile.json"
    profile = calibrate(Replicas(4096), "--output", str(output), "--lengths", "4091,4095")
    assert {sample["tokens"] for sample in profile["handoffs"]} == {2045, 4090}
    calibrate(Replicas(4096), "--check", str(output), "--prompts", "64")
    calibrate(Replicas(33), "--check", str(output))


def test_a_handoff_that_is_refused_costs_no_sweep(calibrate):
    replicas = Replicas(4096, decodes=False)
    with pytest.raises(ConfigError, match="a prompt of 32 tokens was refused"):
        calibrate(replicas)
    assert replicas.asked == [("handoff", 32)]


def test_a_length_that_is_not_below_the_models_is_refused_before_anything_is_measured(calibrate):
    replicas = Replicas(4096)
    with pytest.raises(ConfigError, match="--lengths: 4096 is not below the model's length, which is 4096"):
        calibrate(replicas, "--output", "p.json", "--lengths", "64,4096")
    assert not replicas.asked


def test_a_handoff_that_is_told_is_written(calibrate, tmp_path):
    output = tmp_path / "profile.json"
    profile = calibrate(Replicas(4096), "--output", str(output), "--handoff-ms", "0.001")
    assert profile["predictor"]["handoff_s"] == 1e-6


@pytest.mark.parametrize("handoff_ms", ["0", "-1", "inf", "nan"])
def test_a_handoff_that_no_replica_would_heed_is_refused_before_anything_is_measured(
    calibrate, tmp_path, handoff_ms
):
    replicas = Replicas(4096)
    with pytest.raises(SystemExit):
        calibrate(replicas, "--output", str(tmp_path / "p.json"), "--handoff-ms", handoff_ms)
    assert not replicas.asked


def test_a_profile_that_there_is_no_room_for_leaves_the_one_before(calibrate, tmp_path):
    output = tmp_path / "profile.json"
    calibrate(Replicas(4096), output=output)
    before = output.read_bytes()
    with (
        small_disk(100),
        pytest.raises(ConfigError, match=f"^--output: {output} cannot be written: File too"),
    ):
        calibrate(Replicas(4096), output=output)
    assert output.read_bytes() == before
    assert [*tmp_path.iterdir()] == [output]
