"""The search for goodput, whole studies, and the command."""

import json
import math

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.simulate import SimulateError
from simulator.arms.arms import ARMS, PAPER_ARMS
from simulator.study.goodput import Experiment, blocking, percentiles_ms, point
from simulator.study.presets import PRESETS, on_trace, with_operator_times
from simulator.study.study import Study
from simulator.workload.arrivals import TraceError

PRESET = PRESETS["flowprefill-8b"]
EXPERIMENT = Experiment(PRESET.hardware, PRESET.workload, 300, (1, 2))
CAPACITY = EXPERIMENT.capacity_rps()


@pytest.mark.long
@pytest.mark.parametrize("level", [0.9, 0.99])
@pytest.mark.parametrize("name", ["fcfs", "slackserve"])
def test_goodput_is_attained_and_a_tenth_more_is_not(name, level):
    """Just above it attainment may by chance be reached again: another rate is another interleaving."""
    arm = ARMS[name]
    setting = arm.settings[0]
    rate = EXPERIMENT.goodput_rps(arm, setting, level, CAPACITY)
    assert rate > 0
    assert EXPERIMENT.attains(arm, rate, setting, level)
    assert not EXPERIMENT.attains(arm, 1.1 * rate, setting, level)
    assert point(rate, EXPERIMENT.runs(arm, rate, setting), setting).attainment >= level


@pytest.mark.long
def test_preemption_serves_several_times_what_first_come_first_served_does():
    rates = {
        name: EXPERIMENT.goodput_rps(ARMS[name], ARMS[name].settings[0], 0.9, CAPACITY)
        for name in ("fcfs", "sedf-chunked", "sedf-resume", "slackserve")
    }
    assert rates["slackserve"] > 4 * rates["fcfs"]
    assert rates["slackserve"] > 1.1 * rates["sedf-chunked"]
    assert rates["sedf-resume"] > rates["sedf-chunked"]


def test_a_point_sums_up_its_runs():
    runs = EXPERIMENT.runs(ARMS["slackserve"], CAPACITY, {})
    found = point(CAPACITY, runs, {})
    jobs = [job for served in runs for job in served.jobs]
    assert found.attainment == sum(job.is_on_time for job in jobs) / len(jobs)
    assert set(found.by_kind) == {"text", "image", "search", "file"}
    assert 0.0 < found.wasted_work < 0.03, "stopped within a half layer it does that half again"
    stops = blocking(runs)
    assert stops.count == sum(len(served.replica.blocking_s) for served in runs)
    assert stops.p50 <= stops.p90 <= stops.p99 <= stops.max
    for times in percentiles_ms(jobs).values():
        assert len(times) == 101
        assert times == sorted(times)


def test_a_study_finds_the_same_again_and_its_document_has_what_was_promised():
    study = Study(PRESET, ["fcfs", "slackserve"], requests=50, workers=2)
    seen = []
    found = study.findings("slackserve simulate", lambda done, total: seen.append((done, total)))
    document = json.loads(json.dumps(found.document()))
    assert document == json.loads(json.dumps(study.findings("slackserve simulate").document()))
    assert (document["preset"], document["seed"]) == ("flowprefill-8b", 1)
    assert set(document["goodput_rps"]) == {"fcfs", "slackserve"}
    assert set(document["goodput_rps"]["slackserve"]) == {"0.90", "0.99"}
    assert set(document["blocking_ms"]) == {"slackserve"}
    assert {"mean", "p50", "p99"} <= set(document["blocking_ms"]["slackserve"])
    assert seen[-1][0] == seen[-1][1]
    assert found.arms[1].timeline


def test_the_presets_together_compare_every_arm():
    assert {name for preset in PRESETS.values() for name in preset.arms} == set(ARMS)
    for preset in PRESETS.values():
        assert preset.objective_ms
        assert set(preset.objective_ms) == set(preset.workload.kinds)
    assert all(PRESETS[f"flowprefill-{size}"].arms == PAPER_ARMS for size in ("8b", "14b", "70b"))


def test_a_preset_says_between_which_sizes_only_our_own_order_has_others_to_choose():
    def between(arm):
        return {size for setting in arm.settings for size in setting.values() if 2048 < size < 8192}

    assert {name: len(between(arm)) for name, arm in ARMS.items() if between(arm)} == {
        "slackserve-chunked": 4
    }
    for preset in (PRESET, PRESETS["tiers-70b"]):
        said = " ".join(preset.assumptions)
        assert "none of them between 2,048 and 8,192, where SlackServe's own order in chunks has four" in said


def test_what_was_not_served_is_null_in_json():
    """JSON has no infinity."""
    found = Study(PRESETS["tiers-70b"], ["fcfs", "slackserve-admission"], 200, 1, 1).findings("simulate")
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    ttft_ms = document["arms"][0]["ttft_ms"]
    assert any(value is None for values in ttft_ms.values() for value in values)
    for kind, values in found.arms[0].ttft_ms.items():
        assert [math.inf if value is None else value for value in ttft_ms[kind]] == list(values)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_a_trace_or_says_which_do(name, tmp_path):
    path = tmp_path / "chat.jsonl"
    row = '{"timestamp": %d, "input_length": 10, "output_length": 5}\n'
    path.write_text(row % 0 + row % 1000)
    if name.startswith("flowprefill"):
        assert on_trace(PRESETS[name], path).workload.stream(1.0, 2, 1)
    else:
        with pytest.raises(TraceError, match=f"{name} has no objectives .* flowprefill-8b, flowprefill-14b"):
            on_trace(PRESETS[name], path)


def test_a_preset_on_a_trace(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [
        {"timestamp": 1000 * n, "input_length": 100 + 900 * (n % 20), "output_length": 9} for n in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    preset = on_trace(PRESET, path)
    assert {a.kind for a in preset.workload.stream(1.0, 60, 1)} == {"text", "search", "file"}
    with pytest.raises(TraceError):
        on_trace(PRESET, tmp_path / "none.jsonl")


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_the_command_prints_writes_and_draws(tmp_path):
    out = tmp_path / "out.json"
    result = simulate(
        "flowprefill-8b",
        "--arms",
        "fcfs,slackserve",
        "--requests",
        100,
        "--json",
        out,
        "--report",
        tmp_path / "r",
    )
    assert result.exit_code == 0, result.output
    assert "SlackServe" in result.stdout
    assert set(json.loads(out.read_text())["goodput_rps"]) == {"fcfs", "slackserve"}
    assert (tmp_path / "r" / "report.html").is_file()
    assert list((tmp_path / "r").glob("*.svg"))


def test_a_full_disk_is_one_message(tmp_path):
    (tmp_path / "goodput.png").symlink_to("/dev/full")
    for option, path in (("--json", "/dev/full"), ("--report", tmp_path)):
        result = simulate("--arms", "fcfs", "--requests", 100, option, path)
        assert isinstance(result.exception, SimulateError)
        assert str(result.exception) == f"{option}: {path} cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("flowprefill-9b",), "there are flowprefill-8b"),
        (("--arms", "lifo"), "it has fcfs"),
        (("--trace", "/nowhere.csv"), "there is no such file"),
        (("--operator-times", "/nowhere.csv"), "there is no such file"),
        (("--json", "/nowhere/out.json"), "/nowhere/out.json cannot be written"),
        (("--config", "/nowhere.yaml"), "/nowhere.yaml"),
    ],
)
def test_what_cannot_be_simulated_is_said_before_anything_is(arguments, hint):
    result = simulate(*arguments)
    assert isinstance(result.exception, SimulateError)
    assert hint in str(result.exception)


@pytest.mark.parametrize("short", [0, 1])
def test_a_trace_whose_prompts_are_too_long_is_refused(tmp_path, short):
    path = tmp_path / "long.jsonl"
    lengths = [200_000] * 3 + [100] * short
    rows = [
        {"timestamp": 1000 * n, "input_length": each, "output_length": 9} for n, each in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = simulate("--trace", path)
    assert isinstance(result.exception, SimulateError)
    assert "at least two prompts of up to 131,072 tokens" in str(result.exception)


def test_a_table_without_the_presets_model(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("device,model,tensor_parallel,num_tokens\n")
    with pytest.raises(ValueError, match="no times of a100 Meta-Llama-3-8B tp1"):
        with_operator_times(PRESET, path)


def test_the_command_plans_a_fleet(tmp_path):
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "rate_rps: 6\nrequests: 300\nworkload:\n  kinds:\n"
        "    chat: {share: 1, mean_tokens: 700, ttft_ms: 400, tier: premium}\n"
    )
    result = simulate("--config", fleet, "--json", tmp_path / "plan.json", "--report", tmp_path)
    assert result.exit_code == 0, result.output
    assert "prefill and" in result.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["chosen"] >= 1
    assert (tmp_path / "capacity.svg").is_file()
