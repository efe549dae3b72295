"""Rounds that are added to a result of the comparison are of what it measured, and its pilot stays."""

import json
from contextlib import contextmanager

import pytest

from benchmarks.comparison import load, run
from benchmarks.comparison.arms import FIXED, TUNED, Chunking, chunked
from benchmarks.comparison.earlier import chunks_of_arms, unlike
from benchmarks.report import RESULTS

ARMS = "stock-shipped,stock-priority,stock-pools,slackserve-chunked,slackserve"
COMMAND = ["--rounds", "1", "--loads", "0.9", "--arms", ARMS]


class Servers:
    """All arms answer alike, and a pilot finds `best` the best chunks."""

    best = "2048"

    def run_at(self, arm, server, mix, plan):
        given = [str(arm.step_tokens)] if arm.stock is None else arm.stock
        flags = [self.best in given] * 4
        times = {"urgent": [100.0] * 4, "long": [1000.0] * 4}
        met = {"urgent": flags, "long": flags}
        return load.ArmRun(
            arm.name, plan.round, plan.load, 1.0, met, times, {}, 100.0, 10.0, 0, {}, {}, {"p99": 1.0}
        )


@pytest.fixture
def servers(monkeypatch):
    @contextmanager
    def running(arm, directory, model):
        yield None

    servers = Servers()
    alone = {"ready_s": 1.0, "urgent_alone_ms": [100.0], "long_alone_ms": [1000.0]}
    monkeypatch.setattr(run, "running", running)
    monkeypatch.setattr(run, "write", lambda name, results: None)
    monkeypatch.setattr(load, "warm_up", lambda arm, server: alone)
    monkeypatch.setattr(load, "burst_tokens_ps", lambda *_: 700.0)
    monkeypatch.setattr(load, "run_at", servers.run_at)
    return servers


@pytest.fixture
def found(servers, tmp_path):
    """The file of a first measurement."""
    first = run.Comparison(run.options(COMMAND), tmp_path)
    first.measure()
    return json.loads(json.dumps({"about": run.about(), "results": first.results()}))


def measured(results, arm):
    return [start["settings"] for start in results["starts"] if start["arm"] == arm and start["round"] >= 0]


def more(found, tmp_path, *arguments):
    again = run.Comparison(run.options([*COMMAND, "--more", *arguments]), tmp_path)
    again.go_on(found)
    again.measure()
    return again.results()


def test_an_arm_that_was_not_tuned_keeps_the_chunks_that_it_had(servers, found, tmp_path):
    del found["results"]["chosen"]["stock-pools"]
    servers.best = "512"
    results = more(found, tmp_path)
    for arm in ARMS.split(","):
        first, second = measured(results, arm)
        assert first == second, arm
    assert results["pilot"] == found["results"]["pilot"]
    assert results["chosen"]["stock-pools"] == "2048"
    assert {row["rounds"] for row in results["summary"]} == {2}


def test_the_chunks_of_the_pilot_are_those_that_it_tried(found, tmp_path):
    results = more(found, tmp_path, "--stock-priority-chunks", "128/64,256/32")
    tried = [each["chunk_tokens"] for each in results["pilot"] if each["arm"] == "stock-priority"]
    assert results["settings"]["stock_priority_chunks"] == tried
    assert results["settings"]["stock_chunked_chunks"] == [], "it is not among the arms"


def test_an_arm_that_is_new_to_the_result_is_tuned(servers, found, tmp_path):
    servers.best = "512"
    results = more(found, tmp_path, "--arms", "stock-chunked,slackserve")
    assert results["chosen"] == found["results"]["chosen"] | {"stock-chunked": "512"}
    assert len(measured(results, "stock-chunked")) == 1


def test_settings_that_a_start_does_not_tell_were_empty(found, tmp_path):
    for start in found["results"]["starts"]:
        start["settings"] = {
            name: value for name, value in start["settings"].items() if value not in (None, [])
        }
    assert measured(more(found, tmp_path), "stock-shipped")[1]["pools"] == []


def _arm_differs(found):
    (start,) = [s for s in found["results"]["starts"] if (s["arm"], s["round"]) == ("slackserve", 0)]
    start["settings"] |= {"order": "sedf"}


@pytest.mark.parametrize(
    ("differ", "name"),
    [
        (lambda found: found["results"]["settings"].update(seconds=60.0), "seconds 60.0"),
        (lambda found: found["results"]["settings"].update(pilot_seconds=60.0), "pilot_seconds"),
        (lambda found: found["results"]["settings"].update(mean_output_tokens=8.5), "mean_output_tokens 8.5"),
        (lambda found: found["results"]["settings"].pop("mean_output_tokens"), "mean_output_tokens unknown"),
        (lambda found: found["results"]["settings"].update(long_tokens=[1, 2]), "long_tokens"),
        (lambda found: found["about"].update(cpu="another"), "cpu another"),
        (lambda found: found["about"]["versions"].update(ray="0.1"), "versions"),
        (_arm_differs, "slackserve in round 0"),
    ],
)
def test_what_is_unlike_is_refused_by_name(found, tmp_path, differ, name):
    differ(found)
    with pytest.raises(SystemExit, match=name):
        more(found, tmp_path)


def test_a_start_whose_runs_were_superseded_is_no_measurement(found, tmp_path):
    _arm_differs(found)
    runs = found["results"]["runs"]
    found["results"]["runs"] = [each for each in runs if each["arm"] != "slackserve"]
    assert more(found, tmp_path)["summary"]


def test_published_rounds_are_of_the_arms_of_today():
    found = json.loads((RESULTS / "comparison.json").read_text())
    settings = found["results"]["settings"]
    settings.setdefault("mean_output_tokens", 8.5)
    chunks = chunks_of_arms(found["results"])
    arms = [
        chunked(name, Chunking.parse(chunks[name])) if name in TUNED else FIXED[name]
        for name in settings["arms"]
    ]
    assert unlike(found, settings, found["about"], arms) == []
