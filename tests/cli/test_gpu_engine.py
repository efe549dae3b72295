"""The GPU benchmark's engine with a tiny model on the host: it stops prefills and says what it did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.serving import TINY
from prefill_node.worker.boundary import BoundaryLevel

pytestmark = [pytest.mark.serial, pytest.mark.long]
"""Whether anybody has to be stopped is a matter of milliseconds, which other tests would take."""
ROOT = Path(__file__).parents[2]


def run(out, *arguments, script="engine"):
    """Run it as a person would, and return what it has written."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_CI_ENV": "1",  # vLLM compiles without C++
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", f"benchmarks.gpu.{script}", "--tiny", "--out", str(out), *arguments]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (written,) = out.glob(f"{script}*.json")
    return json.loads(written.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(tmp_path_factory.mktemp("out"), "--arm", "slackserve")


def test_it_says_what_ran(found):
    (engine,) = found["results"]["engine"]
    assert engine["model_runner"] == "V1"
    assert (engine["compilation"], engine["pass_tokens"]) == ("NONE", 2048)
    assert engine["governed"] is True
    assert engine["granularity"] == list(BoundaryLevel)[-1].value
    assert found["about"]["vllm"]
    assert found["about"]["device"]["is_gpu"] is False


def test_long_prefills_make_way_for_urgent_ones(found):
    (row,) = found["results"]["urgent"]
    assert row["preemptions"] > 0
    assert row["order_to_stop_ms"]["count"] == row["preemptions"]
    assert row["during_ms"]["count"] == row["alone_ms"]["count"] == row["victim_ms"]["count"]


def test_the_same_engine_runs_with_and_without_boundaries(found):
    (row,) = found["results"]["idle"]
    assert row["pairs"] == 2
    assert row["with_ms"] > 0
    assert row["without_ms"] > 0


def test_every_request_of_the_load_is_on_time_late_or_unfinished(found):
    (row,) = found["results"]["load"]
    assert row["requests"] == 16
    assert row["ttft_ms"]["count"] + row["unfinished"] == row["requests"]
    assert 0 <= row["on_time"] <= 1
    assert row["on_time_by_kind"]


def test_compiled_passes_make_way_too(tmp_path):
    """On a CPU it is the worker that has them compiled in pieces; a GPU is told so from the start."""
    found = run(tmp_path, "--arm", "compiled", "--part", "urgent")
    (engine,), (row,) = found["results"]["engine"], found["results"]["urgent"]
    assert (engine["compilation"], engine["granularity"]) == ("DYNAMO_TRACE_ONCE", "sublayer")
    assert found["about"]["setup"]["compiled"] is True
    assert row["preemptions"] > 0


def test_a_stock_engine_is_as_vllm_ships_it(tmp_path):
    """On a CPU: compiled as a whole, and no steps ahead; a GPU has both otherwise."""
    found = run(tmp_path, "--arm", "stock", "--part", "urgent")
    (engine,), (row,) = found["results"]["engine"], found["results"]["urgent"]
    assert engine["compilation"] == "DYNAMO_TRACE_ONCE"
    assert engine["governed"] is False
    assert (row["preemptions"], row["order_to_stop_ms"]) == (0, {})


def test_short_passes_in_graphs_are_ours_as_well(tmp_path):
    """On a CPU there are no graphs: what is asked for stays without effect."""
    found = run(tmp_path, "--arm", "graphs", "--part", "urgent")
    (engine,), (row,) = found["results"]["engine"], found["results"]["urgent"]
    assert (engine["compilation"], engine["cuda_graphs"], engine["governed"]) == ("NONE", "NONE", True)
    assert row["preemptions"] > 0


def test_the_whole_application_is_measured(tmp_path):
    found = run(tmp_path, "--mode", "resume", script="serving")
    (mode,) = found["results"]["modes"]
    assert mode["stops"] == mode["ttft_ms"]["urgent"]["count"] == TINY.rounds
    assert mode["order_to_stop_ms"]["count"] == mode["resume_overhead_ms"]["count"] == TINY.rounds
    assert mode["output_tokens"] == [TINY.stream.output_tokens] * TINY.streams
    assert "prefill_stopped" in (tmp_path / "serving-resume.log").read_text()
