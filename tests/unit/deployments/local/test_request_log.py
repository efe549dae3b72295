"""The timeline of a request from log lines as Ray Serve writes them."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli import app
from deployments.local.request_log import events_of, timeline

ID = "ab17aac6-70a1-4e9c-8fd8-40fe25c4bdbe"
OTHER = "0ae072ba-074b-4b03-86e1-b2b67f67ebcb"
JOB = f"{ID}-fc419b9ddd3"
HERE = "slackserve_Prefill:tiny ow9z80ls"
PREFILL = f"""\
INFO 2026-11-22 20:32:50,010 {HERE} {ID} -- prefill_accepted request_id={ID} job_id={JOB} tokens=3900
INFO 2026-11-22 20:32:50,126 {HERE} -- prefill_stopped jobs={JOB},{OTHER}-1 reason=rescue beneficiary={OTHER}
INFO 2026-11-22 20:32:50,200 {HERE} {OTHER} -- prefill_ended request_id={OTHER} seconds=1
Traceback (most recent call last): {ID}
"""
ROUTER = (
    f'{{"levelname": "INFO", "asctime": "2026-11-22 20:32:50,000", "deployment": "slackserve_Router", '
    f'"replica": "jkrp47a2", "message": "request_placed job_id={JOB} tier=background reason=only_replica"}}\n'
    f'{{"not": "ours", "message": "{ID}"}}\n{{ {ID}\n'
)


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "serve").mkdir()
    (tmp_path / "worker-1.err").write_text(PREFILL)
    (tmp_path / "serve" / "replica_Prefill.log").write_text(PREFILL)
    (tmp_path / "serve" / "replica_Router.log").write_text(ROUTER)
    return tmp_path


def test_the_lines_of_a_request_are_found_once_and_in_order(logs):
    found = events_of(ID, logs)
    assert [(each.where, each.event) for each in found] == [
        ("Router jkrp47a2", "request_placed"),
        ("Prefill:tiny ow9z80ls", "prefill_accepted"),
        ("Prefill:tiny ow9z80ls", "prefill_stopped"),
    ]


def test_another_request_whose_id_begins_in_the_same_way_is_another(logs):
    assert events_of(ID[:8], logs) == []
    assert events_of("prefill", logs) == []


def test_a_request_is_found_by_the_servers_own_id_as_well(logs):
    assert events_of("fc419b9ddd3", logs) == events_of(ID, logs)


def test_it_is_shown_with_the_seconds_since_it_began(logs):
    shown = Console(file=io.StringIO(), width=200)
    shown.print(timeline(events_of(ID, logs)))
    placed, accepted, stopped = shown.file.getvalue().splitlines()[1:]
    assert placed.split()[:4] == ["0.000", "Router", "jkrp47a2", "request_placed"]
    assert accepted.split()[0] == "0.010"
    assert "reason=rescue" in stopped
    assert f"beneficiary={OTHER}" in stopped
    assert JOB not in shown.file.getvalue(), "which job it is, is known"


def test_the_command_says_when_there_is_nothing(logs):
    assert CliRunner().invoke(app, ["trace", ID, "--logs", str(logs)]).exit_code == 0
    assert CliRunner().invoke(app, ["trace", "nobody", "--logs", str(logs)]).exit_code == 1
