"""The timeline of a request from log lines as Ray Serve writes them."""

import io
import os

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli import app
from deployments.local.request_log import events_of, print_timeline, timeline
from telemetry import logs

ID = "ab17aac6-70a1-4e9c-8fd8-40fe25c4bdbe"
OTHER = "0ae072ba-074b-4b03-86e1-b2b67f67ebcb"
SERVER_ID = "fc419b9ddd3a0b11"
JOB, THEIRS = f"{ID}-{SERVER_ID}", f"{OTHER}-1e6a2c0b9d8f7345"
HERE = "slackserve_Prefill:tiny ow9z80ls"
PREFILL = f"""\
INFO 2026-11-22 20:32:50,010 {HERE} {ID} -- prefill_accepted request_id={ID} job_id={JOB} tokens=3900
INFO 2026-11-22 20:32:50,126 {HERE} -- prefill_stopped jobs={JOB},{THEIRS} reason=rescue beneficiary={OTHER}
INFO 2026-11-22 20:32:50,200 {HERE} {OTHER} -- prefill_ended request_id={OTHER} seconds=1
Traceback (most recent call last): {ID}
"""
ROUTER = (
    f'{{"levelname": "INFO", "asctime": "2026-11-22 20:32:50,000", "deployment": "slackserve_Router", '
    f'"replica": "jkrp47a2", "message": "request_placed job_id={JOB} tier=background reason=only_replica"}}\n'
    f'{{"not": "ours", "message": "{ID}"}}\n{{ {ID}\n'
)


@pytest.fixture
def request_logs(tmp_path):
    (tmp_path / "serve").mkdir()
    (tmp_path / "worker-1.err").write_text(PREFILL)
    (tmp_path / "serve" / "replica_Prefill.log").write_text(PREFILL)
    (tmp_path / "serve" / "replica_Router.log").write_text(ROUTER)
    return tmp_path


def shown(events):
    console = Console(file=io.StringIO(), width=400)
    console.print(timeline(events))
    return console.file.getvalue()


def test_the_lines_of_a_request_are_found_once_and_in_order(request_logs):
    found = events_of(ID, request_logs)
    assert [(each.where, each.event) for each in found] == [
        ("Router jkrp47a2", "request_placed"),
        ("Prefill:tiny ow9z80ls", "prefill_accepted"),
        ("Prefill:tiny ow9z80ls", "prefill_stopped"),
    ]


def test_another_request_whose_id_begins_in_the_same_way_is_another(request_logs):
    assert events_of(ID[:8], request_logs) == []
    assert events_of("prefill", request_logs) == []


def test_a_request_is_found_by_the_servers_own_id_as_well(request_logs):
    assert events_of(SERVER_ID, request_logs) == events_of(ID, request_logs)


def written(directory, *said):
    lines = (f"INFO 2026-11-22 20:32:50,{number:03} {HERE} -- {each}\n" for number, each in enumerate(said))
    (directory / "replica.log").write_text("".join(lines))


@pytest.mark.parametrize("asked", ["job-7", ID, SERVER_ID])
def test_a_request_that_its_body_has_named_is_found_by_that_and_by_what_its_answer_says(tmp_path, asked):
    written(
        tmp_path,
        f"request_named request_id=job-7 server_id={SERVER_ID} x_request_id={ID}",
        f"request_placed job_id=job-7-{SERVER_ID} tier=premium",
        f"request_ended request_id=job-7 job_id=job-7-{SERVER_ID} outcome=finished",
        f"request_named request_id=job-8 server_id={SERVER_ID[::-1]} x_request_id={OTHER}",
        f"request_placed job_id=job-8-{SERVER_ID[::-1]} tier=premium",
    )
    events = [each.event for each in events_of(asked, tmp_path)]
    assert events == ["request_named", "request_placed", "request_ended"]


@pytest.mark.parametrize("name", ["conv-42", "7", "beef", "cafe-1"])
def test_of_names_that_begin_or_end_alike_each_has_its_own_lines(tmp_path, name):
    jobs = [f"{each}-{SERVER_ID[::-1]}" for each in (f"{name}-3", f"summary-{name}", f"{name}{name}")]
    written(
        tmp_path,
        f"prefill_accepted request_id={name} job_id={name}-{SERVER_ID} tokens=4",
        *(f"prefill_accepted request_id={job.rpartition('-')[0]} job_id={job} tokens=7" for job in jobs),
        f"prefill_stopped jobs={','.join(jobs)} beneficiary={name}-{SERVER_ID}",
        f"prefill_dropped jobs={','.join(jobs)} reason=memory",
        f"request_refused request_id={name} server_id={SERVER_ID[::-1]} status=400",
    )
    found = [each.event for each in events_of(name, tmp_path)]
    assert found == ["prefill_accepted", "prefill_stopped", "request_refused"]


def test_what_is_no_id_is_not_that_of_a_request(tmp_path):
    written(tmp_path, f"prefill_accepted request_id={ID} job_id={JOB} tier=background tokens=7")
    assert events_of("7", tmp_path) == events_of("background", tmp_path) == []


@pytest.mark.parametrize("asked", [ID, SERVER_ID, JOB])
def test_a_prefill_that_was_placed_again_is_the_requests_too(tmp_path, asked):
    written(tmp_path, f"prefill_stopped jobs={JOB}#1 reason=rescue", f"stop_ordered beneficiary={JOB}#12")
    assert [each.event for each in events_of(asked, tmp_path)] == ["prefill_stopped", "stop_ordered"]


def test_it_is_shown_with_the_seconds_since_it_began(request_logs):
    text = shown(events_of(ID, request_logs))
    placed, accepted, stopped = text.splitlines()[1:]
    assert placed.split()[:4] == ["0.000", "Router", "jkrp47a2", "request_placed"]
    assert accepted.split()[0] == "0.010"
    assert "reason=rescue" in stopped
    assert f"beneficiary={OTHER}" in stopped
    assert JOB not in text, "which job it is, is known"


def test_values_of_several_words_and_names_with_digits_are_shown_whole(tmp_path, caplog):
    error = "RuntimeError('no \"[/x]\" in [fd00::5] reason=none')"
    with caplog.at_level("INFO", "ray.serve"):
        logs.event("prefill_failed", job_id=JOB, error=error, p99_ms=5)
    message = caplog.records[0].getMessage()
    (tmp_path / "replica.log").write_text(f"ERROR 2026-11-22 20:32:50,010 {HERE} {ID} -- {message}\n")
    written = error.replace('"', '\\"')
    assert f'error="{written}" p99_ms=5' in shown(events_of(ID, tmp_path))


def test_what_another_requests_value_says_is_not_of_this_one(tmp_path):
    said = f'body_not_understood request_id=r error="no request_id={ID} here"'
    (tmp_path / "replica.log").write_text(f"INFO 2026-11-22 20:32:50,010 {HERE} -- {said}\n")
    assert events_of(ID, tmp_path) == []


@pytest.mark.parametrize("name", ["replica.log.1", "worker-1.err.12"])
def test_logs_that_were_full_are_searched_too(tmp_path, name):
    (tmp_path / name).write_text(PREFILL)
    assert [each.event for each in events_of(ID, tmp_path)] == ["prefill_accepted", "prefill_stopped"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_file_gets_each_event_in_a_line_and_a_terminal_what_fits(request_logs, is_terminal):
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal)
    print_timeline(console, events_of(ID, request_logs))
    lines = console.file.getvalue().splitlines()
    assert (len(lines) == 1 + 3) != is_terminal
    assert (f"reason=rescue beneficiary={OTHER}" in console.file.getvalue()) != is_terminal


def test_the_command_says_when_there_is_nothing(request_logs):
    ran = CliRunner().invoke(app, ["trace", ID, "--logs", str(request_logs)])
    assert ran.exit_code == 0
    assert f"beneficiary={OTHER}" in ran.stdout
    assert CliRunner().invoke(app, ["trace", "nobody", "--logs", str(request_logs)]).exit_code == 1


def test_the_command_says_when_the_logs_are_another_users(request_logs):
    closed = request_logs / "serve"
    closed.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        ran = CliRunner().invoke(app, ["trace", ID, "--logs", str(closed / "logs")])
    finally:
        if is_root:
            os.seteuid(0)
        closed.chmod(0o700)
    assert ran.exit_code == 1
    assert isinstance(ran.exception, SystemExit), "no stack trace"
    assert "cannot be read; run this as the user that the server runs as" in " ".join(ran.output.split())


def test_the_command_says_when_there_are_no_logs(tmp_path):
    ran = CliRunner().invoke(app, ["trace", ID, "--logs", str(tmp_path / "none")])
    assert ran.exit_code == 1
    assert "there is no directory" in " ".join(ran.output.split())
