"""What a result says about the code that it was measured with."""

import subprocess
import sys

import pytest

from benchmarks.report import about, commit, is_dirty


def git(checkout, *arguments):
    subprocess.run(["git", "-C", str(checkout), *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    for name in ("code.py", "docs/img/plot.svg", "benchmarks/results/found.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("committed")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [("code.py", True), ("docs/img/plot.svg", False), ("benchmarks/results/found.json", False)],
)
def test_what_benchmarks_write_is_no_change_of_the_code(checkout, changed, dirty):
    assert not is_dirty(checkout)
    (checkout / changed).write_text("changed")
    assert is_dirty(checkout) is dirty


def test_without_a_repository_there_is_no_commit(tmp_path):
    assert commit(tmp_path) == ""


@pytest.mark.parametrize("is_there", [False, True])
def test_where_files_lie_elsewhere_is_not_told(tmp_path, monkeypatch, is_there):
    output = tmp_path / "found"
    if is_there:
        output.mkdir()
    monkeypatch.setattr(sys, "argv", ["benchmark", "--output", str(output), "--only", "a/b"])
    assert about()["command"].endswith(" --output found --only a/b")
