"""What is wrong with a command's options is one message, before anything is measured or simulated."""

import os

import pytest
from typer.testing import CliRunner

from deployments.cli import app

BENCH = ("bench", "--url", "http://127.0.0.1:1")


def refused(*arguments):
    """The one line that a command ends with."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert type(result.exception).__name__ in {"BenchError", "ConfigError", "SimulateError"}, result.output
    return str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("simulate", "--config", "fleet.yaml", "--trace", "t.csv", "--seed", 7), "--trace, --seed"),
        (("simulate", "flowprefill-14b", "--config", "fleet.yaml"), "preset"),
        (("simulate", "--config", "fleet.yaml", "--arms", "fcfs", "--workers", 1), "--arms, --workers"),
        (("calibrate", "--check", "p.json", "--lengths", "8,16", "--repeats", 2), "--lengths, --repeats"),
        (("calibrate", "--check", "p.json", "--handoff-ms", 1), "--handoff-ms"),
        (("calibrate", "--output", "p.json", "--prompts", 5), "--prompts"),
        ((*BENCH, "--search", "--rate", 5), "--rate"),
        ((*BENCH, "--max-rate", 5, "--attainment", 0.5), "--attainment, --max-rate"),
    ],
)
def test_an_option_that_would_count_for_nothing_is_refused(arguments, told):
    assert refused(*arguments).startswith(f"{told}: counts for nothing with")


COMMANDS = {
    "simulate": ("simulate", "--json"),
    "plan": ("simulate", "--config", "fleet.yaml", "--json"),
    "calibrate": ("calibrate", "--output"),
    "bench": (*BENCH, "--json"),
    "timeline": ("timeline", "--out"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, tmp_path):
    given = COMMANDS[command]
    assert "is a directory" in refused(*given, tmp_path)
    (tmp_path / "file").touch()
    assert "file" in refused(*given, tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_may_not_be_written_is_refused_before_the_work(command, tmp_path):
    given = COMMANDS[command]
    (tmp_path / "kept").touch(0o400)
    assert "cannot be written" in refused(*given, tmp_path / "kept")
    tmp_path.chmod(0o500)
    assert "can be created" in refused(*given, tmp_path / "new")


@pytest.mark.parametrize("arguments", [("observability", "--out"), ("simulate", "--report")])
def test_a_directory_that_cannot_be_made_is_refused_before_the_work(arguments, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be created" in refused(*arguments, tmp_path / "file" / "out")
    assert "cannot be created" in refused(*arguments, tmp_path / "file")


def test_a_full_disk_is_one_message(tmp_path):
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "recording.yaml").symlink_to("/dev/full")
    told = refused("observability", "--out", tmp_path)
    assert told == f"--out: {tmp_path} cannot be written: No space left on device"
