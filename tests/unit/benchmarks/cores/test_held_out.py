"""Goodput on streams that were held out, and what is made of it."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from benchmarks import report
from benchmarks.cores import held_out, held_out_axes, held_out_further
from benchmarks.cores.held_out import (
    Case,
    against,
    at_best,
    completed,
    goodputs,
    offered,
    ratio_interval,
)
from benchmarks.cores.held_out_further import look_further
from benchmarks.report import RESULTS
from simulator.arms.arms import ARMS
from simulator.study.presets import PRESETS


def test_goodput_falls_with_what_is_asked():
    found = goodputs(Case("8b", "slackserve", 0, 0.0, 1000, 200))
    assert found["all 90%"] >= found["worst class 90%"] >= found["worst class 99%"] > 0
    assert found["all 90%"] >= found["all 99%"]
    assert found == goodputs(Case("8b", "slackserve", 0, 0.0, 1000, 200))


def test_every_arm_has_its_best_setting():
    found = {
        Case("8b", arm, setting, 0.0, seed, 100): {"all 90%": 4.0 if arm == "slackserve" else 1.0 + setting}
        for arm in held_out.NAMES
        for setting in range(len(ARMS[arm].settings))
        for seed in (1000, 1001)
    }
    rows = {row["arm"]: row for row in against(at_best(found), held_out.OURS)}
    assert rows["sedf-resume"]["setting"] == dict(ARMS["sedf-resume"].settings[-1])
    assert rows["sedf-resume"]["ours over it"] == pytest.approx(4.0 / len(ARMS["sedf-resume"].settings))
    assert rows["slackserve"]["low"] < rows["slackserve"]["ours over it"] == 1.0 < rows["slackserve"]["high"]


def test_a_stream_below_the_lowest_load_makes_the_mean_a_bound():
    least_rps = held_out.LOADS[0] * held_out.capacity_rps("8b")
    row = {"model": "8b", "sigma": 0.0, "figure": "all 99%"}
    rows = [
        {**row, "arm": "slackserve", "streams": [2.0, 2.0]},
        {**row, "arm": "sedf", "streams": [2.0, 0.0]},
    ]
    ours, peer = against(rows, "slackserve")
    assert (ours["below"], peer["below"]) == (0, 1)
    assert peer["goodput_rps"] == pytest.approx((2.0 + least_rps) / 2)
    assert peer["ours over it"] == pytest.approx(4.0 / (2.0 + least_rps))
    assert peer["streams"] == [2.0, 0.0]
    bases = {name: [[Case("8b", name, 0, 0.0, seed, 100) for seed in (1, 2)]] for name in ("targets", "sedf")}
    cases = [case for tried in bases.values() for case in tried[0]]
    _, peer = held_out_axes.compared(bases, dict(zip(cases, (2.0, 2.0, 2.0, 0.0), strict=True)))
    assert (peer["below"], peer["goodput_rps"]) == (1, pytest.approx((2.0 + least_rps) / 2))


@pytest.fixture
def file(tmp_path, monkeypatch):
    """That of the result `held_out`, in a folder of the test's own."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return tmp_path / "held_out.json"


def test_means_are_taken_again_from_the_streams(file):
    known = json.loads((RESULTS / "cores" / "held_out.json").read_text())
    known["results"]["rows"] = [{**row, "goodput_rps": 0.0} for row in known["results"]["rows"]]
    file.write_text(json.dumps(known))
    held_out.compare_again("held_out", "slackserve")
    again = json.loads(file.read_text())
    assert again["about"] == known["about"]
    for row in again["results"]["rows"]:
        assert row["below"] or row["goodput_rps"] == pytest.approx(fmean(row["streams"]))


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ([], "slackserve"),
        (["--arm", "targets"], "targets"),
        (["--arm", "sedf", "--arm", "slackserve"], "slackserve"),
        (["--arm", "sedf", "--arm", "fcfs", "--ours", "fcfs"], "fcfs"),
    ],
)
def test_ours_is_the_only_arm_if_nobody_says_whom(arguments, ours):
    assert held_out.options_of(arguments).ours == ours


@pytest.mark.parametrize(
    ("of", "arguments", "why"),
    [
        (held_out, ["--arm", "targets", "--ours", "slackserve"], "slackserve is not among the arms: targets"),
        (held_out, ["--arm", "sedf", "--arm", "fcfs"], "slackserve is not among the arms: sedf, fcfs"),
        (held_out_axes, ["--level", "0.95"], "0.95"),
    ],
)
def test_what_could_not_be_compared_is_refused_before_anything_is_simulated(of, arguments, why, capsys):
    with pytest.raises(SystemExit):
        of.options_of(arguments)
    assert why in capsys.readouterr().err


def test_a_ratio_of_pairs_is_narrower_than_the_streams_differ():
    other = [float(value) for value in range(5, 25)]
    low, ratio, high = ratio_interval([1.1 * value for value in other], other)
    assert ratio == pytest.approx(1.1)
    assert 0 < high - low < 0.01, "as far as one step of the grid is wide, over twenty streams"
    low, ratio, high = ratio_interval(other[::-1], other)
    assert ratio == pytest.approx(1.0)
    assert (low < 0.8, high > 1.2) == (True, True)
    assert ratio_interval([1.0], [2.0]) == (0.0, 0.5, math.inf)


@pytest.mark.parametrize("streams", [5, 10, 20])
def test_the_interval_of_a_ratio_covers_it_as_often_as_it_says(streams):
    drawn, covered = np.random.default_rng(0), []
    for _ in range(2000):
        stream, gain = drawn.normal(0, 0.04, streams), drawn.normal(0.02, 0.05, streams)
        low, _, high = ratio_interval(np.exp(stream + gain).tolist(), np.exp(stream).tolist())
        covered.append(low <= math.exp(0.02 + 0.05**2 / 2) <= high)
    assert fmean(covered) == pytest.approx(0.95, abs=0.02)


def attained_by(levels):
    """What `attainments` gives, for the places of the grid that keep 99 %."""
    return lambda number, _: {"all": 0.995 if number in levels else 0.98, "worst class": 0.5}


def test_goodput_is_the_highest_load_that_keeps_the_level_with_none_near_above_it(monkeypatch):
    case = Case("8b", "slackserve", 0, 0.0, 1000, 200)
    good = {*range(40), *range(45, 50), 56, 70}
    monkeypatch.setattr(held_out, "attainments", lambda *_: attained_by(good))
    found = goodputs(case)
    assert found["all 99%"] == pytest.approx(held_out.LOADS[56] * held_out.capacity_rps("8b"))
    assert found["worst class 99%"] == 0.0


def test_a_search_goes_on_above_what_was_found(file, monkeypatch):
    rates = [load * held_out.capacity_rps("8b") for load in held_out.LOADS]
    rows = [
        {"model": "8b", "sigma": 0.0, "figure": "all 99%", "arm": arm, "setting": setting, "streams": streams}
        for arm, setting, streams in (
            ("slackserve", {}, [rates[39], rates[56]]),
            ("sedf-resume", {"join_tokens": 2048.0}, [0.0, rates[48]]),
        )
    ]
    about = {"streams": 2, "requests": 200, "first_seed": 1000}
    file.write_text(json.dumps({"about": {}, "results": {**about, "rows": rows}}))
    monkeypatch.setattr(held_out_further, "ProcessPoolExecutor", ThreadPoolExecutor)
    good = {3, *range(40), *range(45, 50), 56}
    monkeypatch.setattr(held_out_further, "attainments", lambda *_: attained_by(good))
    look_further(["held_out"], ["slackserve"], 1)
    ours, peer = json.loads(file.read_text())["results"]["rows"]
    assert ours["streams"] == pytest.approx([rates[56], rates[56]])
    assert peer["streams"] == pytest.approx([rates[56], rates[56]])
    assert peer["ours over it"] == pytest.approx(1.0)
    monkeypatch.setattr(held_out_further, "attainments", lambda *_: attained_by({}))
    with pytest.raises(ValueError, match="does not attain all 99% at"):
        look_further(["held_out"], ["slackserve"], 1)


def test_a_row_says_at_which_commit_its_streams_were_searched(file, monkeypatch):
    rate_rps = held_out.LOADS[50] * held_out.capacity_rps("8b")
    row = {"model": "8b", "sigma": 0.0, "figure": "all 99%", "arm": "slackserve", "setting": {}}
    row |= {"streams": [rate_rps], "commit": "first"}
    about = {"streams": 1, "requests": 200, "first_seed": 1000}
    file.write_text(json.dumps({"about": {}, "results": {**about, "rows": [row]}}))
    monkeypatch.setattr(held_out_further, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(held_out_further, "look", lambda search: search.rate_rps)
    for streams, now, expected in (
        (2, "second", ["first", "second"]),
        (4, "third", ["first", "second", "third", "third"]),
        (None, "last", ["last"]),
    ):
        monkeypatch.setattr(held_out_further, "commit", lambda now=now: now)
        look_further(["held_out"], ["slackserve"], 1, streams)
        (found,) = json.loads(file.read_text())["results"]["rows"]
        assert [found["commit"], *found.get("more_commits", [])] == expected
    assert len(found["streams"]) == 4


def test_streams_that_a_result_lacks_are_searched_from_the_mean_of_the_others(file, monkeypatch):
    rates = [load * held_out.capacity_rps("8b") for load in held_out.LOADS]
    row = {"model": "8b", "sigma": 0.0, "figure": "all 99%", "arm": "slackserve", "setting": {}}
    about = {"streams": 1, "requests": 200, "first_seed": 1000}
    monkeypatch.setattr(held_out_further, "ProcessPoolExecutor", ThreadPoolExecutor)
    seeds = []

    def attained(levels):
        def of_case(case, _):
            seeds.append(case.seed)
            return attained_by(levels)

        return of_case

    for good, found in (({*range(60)}, 59), ({*range(30)}, 29), ({*range(45), 55}, 44), (set(), None)):
        seeds.clear()
        file.write_text(
            json.dumps({"about": {}, "results": {**about, "rows": [{**row, "streams": [rates[50]]}]}})
        )
        monkeypatch.setattr(held_out_further, "attainments", attained(good))
        look_further(["held_out"], ["slackserve"], 1, streams=3)
        results = json.loads(file.read_text())["results"]
        expected = 0.0 if found is None else pytest.approx(rates[found])
        assert results["rows"][0]["streams"] == [rates[50], expected, expected]
        assert results["streams"] == 3
        assert sorted(seeds) == [1001, 1002], "what was found is not searched again"


def test_what_was_found_before_an_interruption_is_not_searched_again(file, tmp_path, monkeypatch):
    rates = [load * held_out.capacity_rps("8b") for load in held_out.LOADS]
    row = {"model": "8b", "sigma": 0.0, "figure": "all 99%", "arm": "slackserve", "setting": {}}
    journal = tmp_path / "further.jsonl"
    results = {"streams": 1, "requests": 200, "first_seed": 1000, "rows": [{**row, "streams": [rates[50]]}]}
    file.write_text(json.dumps({"about": {}, "results": results}))
    monkeypatch.setattr(held_out_further, "ProcessPoolExecutor", ThreadPoolExecutor)
    seeds = []

    def attained(case, _):
        seeds.append(case.seed)
        if case.seed == interrupted:
            raise KeyboardInterrupt
        return attained_by({*range(60)})

    monkeypatch.setattr(held_out_further, "attainments", attained)
    interrupted = 1003
    with pytest.raises(KeyboardInterrupt):
        look_further(["held_out"], ["slackserve"], 1, 4, journal)
    assert (seeds, len(journal.read_text().splitlines())) == ([1001, 1002, 1003], 2)
    seeds.clear()
    interrupted = 0
    look_further(["held_out"], ["slackserve"], 1, 4, journal)
    assert seeds == [1003]
    (found,) = json.loads(file.read_text())["results"]["rows"]
    assert found["streams"] == pytest.approx([rates[50], *[rates[59]] * 3])
    monkeypatch.setattr(held_out_further, "commit", lambda: "another")
    with pytest.raises(ValueError, match="this is another: give another"):
        look_further(["held_out"], ["slackserve"], 1, 4, journal)


def test_an_arm_that_aims_has_the_level_as_the_target_of_each_kind():
    case = Case("8b", "targets", 0, 0.0, 1000, 200)
    replica, mix = offered(case, 0.99)
    assert set(replica.tiers.targets.values()) == {0.99}
    assert set(replica.tiers.targets) == {kind.tier for kind in mix.kinds.values()}
    alike, _ = offered(replace(case, arm="slackserve"), 0.99)
    assert alike is PRESETS["flowprefill-8b"].hardware


def test_objectives_and_charges_are_those_of_the_case():
    case = Case("8b", "targets", 0, 0.0, 1000, 200, bias=0.7, scale=0.5, charged_s=1e-4, launch_s=0.04)
    replica, mix = offered(case, 0.9)
    assert (replica.cost.check_s, replica.cost.launch_s, replica.noise.bias) == (1e-4, 0.04, 0.7)
    assert mix.kinds["text"].ttft_s == pytest.approx(0.125)
    for peer in ("sedf-resume", "slackserve-chunked"):
        cost = offered(replace(case, arm=peer), 0.9)[0].cost
        assert (cost.check_s, cost.launch_s) == (0, 0)


def test_earlier_rows_stand_beside_new_ones_if_the_streams_are_the_same():
    written = json.loads((RESULTS / "cores" / "held_out.json").read_text())["results"]
    streams, many = {key: written[key] for key in ("streams", "requests", "first_seed")}, written["streams"]
    new = [{"model": "8b", "sigma": 0.0, "figure": "all 90%", "arm": "targets", "streams": [2.0] * many}]
    rows = against(completed("cores/held_out", streams, new), "targets")
    assert {row["arm"] for row in rows} == {*held_out.NAMES, "targets"}
    assert {(row["model"], row["figure"]) for row in rows} == {("8b", "all 90%")}
    known = next(row for row in rows if row["arm"] == "sedf-resume")
    assert known["ours over it"] == pytest.approx(2.0 / known["goodput_rps"])
    better = [{**row, "arm": "sedf-resume", "commit": "now"} for row in new]
    for streams_rps, kept in (([99.0] * many, "now"), ([0.1] * many, known["commit"])):
        (row,) = (
            row
            for row in completed("cores/held_out", streams, [{**better[0], "streams": streams_rps}])
            if row["arm"] == "sedf-resume"
        )
        assert row["commit"] == kept
    with pytest.raises(ValueError, match="its streams differ"):
        completed("cores/held_out", {**streams, "streams": 9}, new)


def test_the_break_even_lies_between_the_charges_about_it():
    assert held_out_axes.break_even_s([(0.0, 1.1), (1e-4, 0.9)]) == pytest.approx(5e-5)
    assert held_out_axes.break_even_s([(0.0, 1.1), (1e-4, 1.05)]) is None


def test_at_each_place_a_peer_has_the_setting_that_is_best_there():
    tried = held_out_axes.along(Case("8b", "targets", 0, 0.0, 0, 100), 2, "scale", 0.5)
    assert {name: len(of_arm) for name, of_arm in tried.items()} == {
        "sedf-resume": len(ARMS["sedf-resume"].settings),
        "sedf-chunked": len(ARMS["sedf-chunked"].settings),
        "targets-chunked": len(ARMS["slackserve-chunked"].settings),
        "targets": 1,
    }
    cases = [case for of_arm in tried.values() for of_setting in of_arm for case in of_setting]
    assert {case.scale for case in cases} == {0.5}
    found = {case: 6.0 if case.arm == "targets" else 1.0 + case.setting for case in cases}
    rows = {row["arm"]: row for row in held_out_axes.compared(tried, found)}
    assert rows["sedf-chunked"]["setting"] == ARMS["sedf-chunked"].settings[-1]
    assert rows["sedf-chunked"]["goodput_rps"] == len(ARMS["sedf-chunked"].settings)


def test_what_is_charged_is_charged_to_ours_alone():
    groups = held_out_axes.along(Case("8b", "targets", 0, 0.0, 0, 100), 2, "charged_s", 1e-4)
    assert {name: {case.charged_s for case in tried[0]} for name, tried in groups.items()} == {
        "sedf-resume": {0.0},
        "sedf-chunked": {0.0},
        "targets-chunked": {0.0},
        "targets": {1e-4},
    }
    assert [case.seed for case in groups["targets"][0]] == [1000, 1001]


@pytest.mark.parametrize(
    ("arm", "step_s"),
    [("targets-chunked", 0.0), ("sedf-chunked", 0.0), ("sedf-resume", 3e-3), ("targets", 3e-3)],
)
def test_who_cannot_be_stopped_may_compose_passes_ahead(arm, step_s):
    replica, _ = offered(Case("8b", arm, 0, 0.0, 1000, 200, hidden=1.0), 0.9)
    assert replica.cost.step_s == step_s


def test_preemption_is_removed_first():
    parts = held_out_axes.without_parts(Case("8b", "targets", 0, 0.0, 0, 100), 1)
    assert [*parts][:3] == ["targets", "targets-chunked 1024", "targets-chunked 2048"]
