"""What was measured of a failure replaces what was known of it, and nothing else."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import report
from benchmarks.engines import failures

ROOT = Path(__file__).parents[4]


@pytest.fixture
def results(tmp_path, monkeypatch):
    for module in (report, failures):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path / "engines/failures.json"


def measured(tmp_path, *rows):
    path = tmp_path / "measured"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_second_run_replaces_what_it_has_measured(results, tmp_path):
    failures.keep(measured(tmp_path, {"fault": "b", "errors": 1, "lost_s": 3}, {"fault": "a", "errors": 0}))
    failures.keep(measured(tmp_path, {"fault": "b", "errors": 2}))
    rows = json.loads(results.read_text())["results"]
    assert [(name, row["errors"], row.get("lost_s")) for name, row in rows.items()] == [
        ("a", 0, None),
        ("b", 2, None),
    ]
    assert all(row["commit"] and row["date"] for row in rows.values())


def test_a_run_of_no_test_changes_nothing(results, monkeypatch):
    monkeypatch.setattr("sys.argv", ["failures", "--no-such-option"])
    ran = SimpleNamespace(returncode=4)
    monkeypatch.setattr(failures.subprocess, "run", lambda command, **_: commands.append(command) or ran)
    commands = []
    assert failures.main() == 4
    assert commands[0][-1] == "--no-such-option"
    assert not results.exists()


def test_every_test_that_tells_what_it_measured_is_run():
    telling = {
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^from fleet import .*\btell\b", path.read_text(), re.MULTILINE)
    }
    run = {path for path in telling for given in failures.TESTS if path.is_relative_to(ROOT / given)}
    assert telling
    assert run == telling
