"""The documentation says what was measured."""

import json
import shutil

import pytest

from benchmarks import report
from benchmarks.doc_tables import PAGES, TABLES, autoscaling, decode, origins, remade
from benchmarks.report import RESULTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert remade(text) == text, "run `make tables`"


def test_every_table_stands_somewhere():
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in text] == []


def test_pages_in_folders_have_tables_too():
    assert "simulated.md" in {page.name for page in PAGES if page.parent.name == "benchmarks"}


def test_the_commits_of_a_result_are_told_with_what_is_known_of_them():
    (lost, *_) = origins.NOT_IN_HISTORY
    found = {
        "about": {"commit": "aaaaaa1", "dirty": False},
        "results": {
            "rows": [{"commit": "aaaaaa1", "more_commits": ["aaaaaa2", "aaaaaa2"]}, {"commit": lost}],
            "settings": {"commits": {"one": "aaaaaa3", "two": "a working tree between aaaaaa1 and aaaaaa4"}},
            "further": {"commit": "aaaaaa2", "dirty": False},
            "compared": {"commit": "aaaaaa5", "dirty": True},
        },
    }
    assert origins.commits(found) == {
        "aaaaaa1": "",
        "aaaaaa2": "",
        lost: "†?",
        "aaaaaa1 to aaaaaa4": "*",
        "aaaaaa3": "?",
        "aaaaaa5": "*",
    }


def test_every_commit_that_is_in_no_history_is_one_of_a_result():
    named = set().union(*(origins.commits(json.loads(path.read_text())) for path in RESULTS.rglob("*.json")))
    assert named >= origins.NOT_IN_HISTORY


def test_another_result_is_another_table(monkeypatch, tmp_path):
    name = "held-out-90"
    results = json.loads((RESULTS / "cores" / "held_out.json").read_text())
    page = f"<!-- table: {name} -->\n<!-- end of table -->"
    before = remade(page)
    results["results"]["rows"][0]["goodput_rps"] += 1.0
    (tmp_path / "cores").mkdir()
    (tmp_path / "cores" / "held_out.json").write_text(json.dumps(results))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert remade(before) != before


@pytest.mark.parametrize(
    ("name", "file"), [("decode-pressure-minute", "decode_pressure_minute"), ("decode-pace", "decode_pace")]
)
def test_the_longest_wait_for_a_token_is_that_of_all_rounds(name, file, monkeypatch):
    found = report.result(f"engines/{file}")
    found["rounds"][0]["gap max s"] = 99.0
    monkeypatch.setattr(decode, "result", lambda _: found)
    assert TABLES[name]().count("99.0 s") == 1


@pytest.mark.parametrize("name", ["autoscaling", "decode_autoscaling"])
@pytest.mark.parametrize(
    "place",
    [("loads", "step", "ours", "per_replica_hour"), ("loads", "day", "fixed"), ("constant", 0, "high")],
)
def test_another_result_of_a_sizer_is_another_page(name, place, monkeypatch, tmp_path):
    (page,) = [page for page in PAGES if page.name == "autoscaling.md"]
    (tmp_path / "cores").mkdir()
    for file in (RESULTS / "cores").glob("*autoscaling*.json"):
        shutil.copy(file, tmp_path / "cores")
    file = tmp_path / "cores" / f"{name}.json"
    found = json.loads(file.read_text())
    inner = found["results"]
    for key in place[:-1]:
        inner = inner[key]
    if isinstance(inner[place[-1]], dict):
        inner[place[-1]]["replicas"] += 1
    else:
        inner[place[-1]] += 100
    file.write_text(json.dumps(found))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert remade(page.read_text()) != page.read_text()


def test_the_part_that_was_refused_is_shown_of_a_prefill_tier(monkeypatch):
    found = report.result("cores/autoscaling")
    found["loads"]["step"]["ours"]["left_out"] = 0.987
    monkeypatch.setattr(autoscaling, "result", lambda _: found)
    ours = TABLES["autoscaling"]().splitlines()[2]
    assert ours.split(" | ")[3] == "98.7%"


def test_of_rays_settings_below_the_target_those_are_shown_that_no_other_excels(monkeypatch):
    def ray(setting, attainment, per_replica_hour):
        found = {"attainment": attainment, "per_replica_hour": per_replica_hour}
        return {"setting": setting, "replica_hours": 1.0, "max_replicas": 8, "turns": 0, **found}

    default, slow = ray([2.0, 30.0, 600.0], 0.94, 100.0), ray([3.0, 5.0, 120.0], 0.99, 200.0)
    behind, ahead = ray([4.0, 5.0, 120.0], 0.90, 150.0), ray([5.0, 5.0, 120.0], 0.80, 300.0)
    arms = {"ours": slow, "ray": default, "ray_tuned": slow, "fixed": {"replicas": 3, **slow}}
    loads = {"step": {**arms, "all_ray": [default, slow, behind, ahead]}}
    monkeypatch.setattr(autoscaling, "result", lambda _: {"loads": loads})
    rows = [row.split(" | ")[1] for row in autoscaling.sizers("any", below_target=True).splitlines()[2:]]
    tuned, other = (f"{requests} requests per replica, 5 and 120 s" for requests in (3, 5))
    assert rows == [
        "ours",
        "Ray's defaults",
        f"Ray's, tuned: {tuned}",
        f"Ray's, {other}",
        "3 replicas, fixed",
    ]
    arms["ray_tuned"] = default
    loads["step"] = {**arms, "all_ray": [default]}
    rows = [row.split(" | ")[1] for row in autoscaling.sizers("any", below_target=True).splitlines()[2:]]
    assert rows == ["ours", "Ray's defaults, which are the tuned ones", "3 replicas, fixed"]
