"""The GPU benchmark with a small model on the host: what it finds is true, and others can read it."""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import exactness as exact
from benchmarks.gpu.decoder import KVCache, random_decoder
from benchmarks.gpu.device import Device
from benchmarks.gpu.mechanism import SMALL, TINY, measure, variants, verdicts
from benchmarks.gpu.operator_times import write_operators, write_profile
from benchmarks.gpu.predicted import standstill_ms
from benchmarks.gpu.variants import Bench, Variant
from benchmarks.gpu.vllm_fit import missing
from prefill_node.board.board import Board
from prefill_node.worker.boundary import BoundaryLevel
from simulator.cost.operators import (
    ATTENTION,
    LLAMA_3_8B,
    OPERATORS,
    OperatorTableError,
    measured_device,
    read_attention_flops_ps,
    read_operator_times,
)
from simulator.cost.passes import PassTimes
from simulator.study.presets import PRESETS, with_operator_times
from slo.files.profile import read_profile
from slo.predict.prefill_time import Sample

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a tiny run, and what it has written."""
    out = tmp_path_factory.mktemp("gpu")
    measure(TINY, Device("cpu"), out, seed=3)
    return out, json.loads((out / "mechanism.json").read_text())


@pytest.fixture
def bench():
    with Board.create(1) as board, torch.inference_mode():
        decoder = random_decoder(SMALL, 256, torch.float32, torch.device("cpu"), seed=1)
        yield Bench(decoder, Device("cpu"), board, None, seed=2)


def test_every_resumed_pass_ends_as_it_would_have(run):
    _, found = run
    rows = found["results"]["exactness"]
    assert {row["tokens"] for row in rows} == {TINY.exact_tokens, TINY.tokens}
    for row in rows:
        assert row["bitwise_equal"] == row["stopped_at"] > 0
        assert row["differing"] == []


def test_between_layers_a_checkpoint_is_two_rows(run):
    _, found = run
    rows = [row for row in found["results"]["exactness"] if row["variant"] == "layer, ahead 2 ms"]
    assert len(rows) == 2
    for row in rows:
        assert row["checkpoint_bytes"] == row["two_rows_bytes"] == 2 * row["tokens"] * SMALL.hidden * 4


def test_stopping_adds_no_error_against_float64(run):
    _, found = run
    rows = found["results"]["float64"]
    assert len(rows) >= 2
    for row in rows:
        assert 0 < row["undisturbed"] < 0.02
        assert row["stopped_most"] == row["undisturbed"]


def test_each_variant_is_stopped_and_compared_idle(run):
    _, found = run
    (fitted,) = found["results"]["fitted"]
    assert fitted["missing"] == []
    names = {variant.name for variant in variants()}
    assert {*fitted["variants"]} == names
    assert {row["variant"] for row in found["results"]["stops"]} == {*fitted["variants"]}
    assert {row["variant"] for row in found["results"]["idle"]} == {*fitted["variants"], "bare again"}
    for row in found["results"]["stops"]:
        assert row["moments"] > 0
        for times in (row["decided_ms"], row["idle_ms"], row["urgent_ttft_ms"], row["urgent_alone_ms"]):
            assert not times or 0 <= times["p50"] <= times["p99"] <= times["max"]
    assert "left_out" not in found["results"]


def test_the_record_says_what_it_was_measured_on(run):
    _, found = run
    about = found["about"]
    assert about["device"] == {"name": "host, no GPU", "is_gpu": False}
    assert about["seed"] == 3
    assert about["versions"]["torch"]
    assert about["command"]


def test_times_of_a_host_reach_no_target(run):
    _, found = run
    whats = {row["what"] for row in found["results"]["targets"]}
    assert whats == {"resumed exactly", "checkpoint, MiB"}
    assert {row[0] for row in verdicts(found["results"], is_gpu=True)} > whats


class Drifting(Bench):
    """Each pass gives something else."""

    def run(self, *args, **kwargs):
        logits, stop = super().run(*args, **kwargs)
        return logits + 1e-3 * next(self.steps), stop


def test_a_result_that_differs_is_noticed(bench):
    drifting = Drifting(bench.decoder, bench.device, bench.signal, None, seed=2)
    fitted = drifting.fit(Variant(BoundaryLevel.LAYER, 1))
    prompt, other = drifting.prompt("a", 24), drifting.prompt("b", 8)
    drifting.warm_up([fitted], prompt)
    row = exact.exactness(drifting, fitted, prompt, other, 16, random.Random(1))
    assert row["differing"] == [*range(SMALL.layers)]


def test_the_decoder_without_boundaries_is_left_as_it_was(bench):
    prompt = bench.prompt("a", 24)
    before = bench.decoder(prompt.tokens, prompt.cache)
    for granularity in BoundaryLevel:
        fitted = bench.fit(Variant(granularity, 1))
        assert not any("forward" in vars(module) for module in bench.decoder.modules())
        if fitted is not None:
            bench.use(fitted)
            assert torch.equal(bench.run(fitted, prompt)[0], before)
            bench.use(None)
    assert torch.equal(bench.decoder(prompt.tokens, prompt.cache), before)


@pytest.mark.slow
def test_the_decoder_computes_what_transformers_computes():
    from transformers import LlamaConfig, LlamaForCausalLM

    decoder = random_decoder(SMALL, 256, torch.float32, torch.device("cpu"), seed=1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=SMALL.hidden,
        intermediate_size=SMALL.intermediate,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
    )
    theirs = LlamaForCausalLM(config).eval()
    state = {}
    for name, value in decoder.state_dict().items():
        if "qkv_proj" in name:
            parts = value.split(decoder.layers[0].self_attn.sizes)
            state |= {f"model.{name.replace('qkv', part)}": v for part, v in zip("qkv", parts, strict=True)}
        elif "gate_up" in name:
            parts = value.chunk(2)
            renamed = [name.replace("gate_up", part) for part in ("gate", "up")]
            state |= {f"model.{n}": v for n, v in zip(renamed, parts, strict=True)}
        elif name == "embed_tokens":
            state["model.embed_tokens.weight"] = value
        else:
            state[name if name.startswith("lm_head") else f"model.{name}"] = value
    theirs.load_state_dict(state)
    tokens = torch.randint(256, (40,))
    with torch.inference_mode():
        given = decoder(tokens, KVCache(decoder, 40))
        expected = theirs(tokens[None]).logits[0, -1:]
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-4)


# What the simulator reads


def test_the_simulator_reads_the_operator_times(run):
    out, _ = run
    path = out / "operators.csv"
    device = measured_device(path, "small", 1, usual="a100")
    times = read_operator_times(path, device, "small", 1)
    assert all(times[name](64) > 0 for name in OPERATORS)
    assert read_attention_flops_ps(path, device, "small", 1, SMALL) > 0


def test_the_simulator_reads_the_profile(run):
    out, found = run
    predictor = read_profile(out / "profile.json", ValueError).predictor
    measured = [row["ms"] / 1e3 for row in found["results"]["passes"]]
    # Passes of a few hundred microseconds on a busy host say nothing of how they grow.
    assert 0 < predictor.prefill_s(64) <= predictor.prefill_s(128) < 10 * max(measured)


def test_a_profile_is_the_curve_through_its_passes(tmp_path):
    samples = [Sample(tokens, max(8.4e-3, tokens * 1e-4)) for tokens in (32, 64, 128, 256) for _ in range(2)]
    write_profile(tmp_path / "profile.json", samples, {})
    predictor = read_profile(tmp_path / "profile.json", ValueError).predictor
    assert [predictor.prefill_s(tokens) for tokens in (64, 100, 256)] == pytest.approx(
        [8.4e-3, 10e-3, 25.6e-3]
    )


def test_a_preset_takes_operators_and_attention_of_another_gpu(tmp_path):
    path = tmp_path / "operators.csv"
    rows = [
        {"num_tokens": tokens} | {f"{name}_ms": tokens / 1e4 for name in (*OPERATORS, ATTENTION)}
        for tokens in (1000, 4000)
    ]
    write_operators(path, "NVIDIA H200", "Meta-Llama-3-8B", rows)
    cost = with_operator_times(PRESETS["flowprefill-8b"], path).hardware.cost
    assert cost.operators["mlp_up_proj"](2000) == pytest.approx(2000 / 1e7)
    layer_s = (len(OPERATORS) + 2) * 4000 / 1e7  # `add` twice, and attention
    assert cost.times([(4000, 0)]).layer_s == pytest.approx(layer_s)


def test_times_of_several_devices_are_not_guessed_at(tmp_path):
    path = tmp_path / "operators.csv"
    rows = [{"num_tokens": 1000} | {f"{name}_ms": 1.0 for name in OPERATORS}]
    for device in ("one", "other"):
        write_operators(tmp_path / device, device, "m", rows)
    lines = (tmp_path / "other").read_text().splitlines()
    path.write_text((tmp_path / "one").read_text() + lines[1] + "\n")
    with pytest.raises(OperatorTableError, match="one, other"):
        measured_device(path, "m", 1, usual="a100")
    assert measured_device(path, "m", 1, usual="one") == "one"
    assert read_attention_flops_ps(path, "one", "m", 1, LLAMA_3_8B) is None


# Where it runs


def test_it_needs_neither_vllm_nor_ray_nor_what_the_servers_need():
    absent = ["vllm", "ray", "pydantic", "rich", "yaml", "opentelemetry"]
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); import benchmarks.gpu.mechanism"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=ROOT, timeout=60)


def test_the_installed_vllm_has_what_is_built_on():
    package = Path(importlib.util.find_spec("vllm").origin).parent
    assert missing(package) == []


def test_a_vllm_that_lacks_something_is_told(tmp_path):
    package = Path(importlib.util.find_spec("vllm").origin).parent
    for name in ("v1", "config", "distributed", "model_executor", "compilation", "forward_context.py"):
        (tmp_path / name).symlink_to(package / name)
    assert missing(tmp_path) == []
    (tmp_path / "v1").unlink()
    shutil.copytree(package / "v1" / "core", tmp_path / "v1" / "core")
    scheduler = tmp_path / "v1" / "core" / "sched" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("timestamp: float", "at: float"))
    problems = missing(tmp_path)
    assert "v1/core/sched/scheduler.py: Scheduler: _preempt_request takes no timestamp" in problems
    assert "there is no v1/request.py" in problems


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")
def test_on_a_gpu_every_resumed_pass_ends_as_it_would_have(tmp_path):
    found = measure(TINY, Device("cuda"), tmp_path, seed=3).results
    assert all(not row["differing"] for row in found["exactness"])
    assert "left_out" not in found


def test_a_stop_waits_for_the_first_boundary_that_the_host_has_not_reached():
    times = PassTimes(head_s=0.0, layer_s=1.0, ends=(0.5, 1.0), layers=4)
    waits_ms = standstill_ms(times, 0.0)
    assert 0 < min(waits_ms) < 1
    assert max(waits_ms) == pytest.approx(500, abs=1)
    ahead_ms = standstill_ms(times, 0.25)
    assert max(ahead_ms) == pytest.approx(750, abs=1)
    # In the last quarter second no boundary is left: the pass ends, half a second sooner than one would come.
    assert sum(ahead_ms) / len(ahead_ms) == pytest.approx(500 - 500 * 0.25 / 4)
