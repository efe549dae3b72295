"""The page of a server's last minutes."""

import re
from base64 import b64decode
from datetime import UTC, datetime, timedelta

import pytest
import typer

from deployments.options import seconds
from deployments.timeline.page import MOST_ROWS, Heard, _shown, html
from prefill_node.replica.job_history import JobState, PastJob, ReplicaPast, Stretch
from slo.request import JobId
from slo.tiers import BACKGROUND, PREMIUM

ASKED_AT = datetime(2026, 3, 4, 12, 0, 30, tzinfo=UTC)
TIERS = ("premium", "standard", "background")


def job(name, start_s, end_s, tier=BACKGROUND, due_s=None, stop=None):
    waiting = Stretch(JobState.WAITING, start_s, start_s + 0.1)
    if stop is None:
        rest = [Stretch(JobState.RUNNING, start_s + 0.1, end_s)]
    else:
        rest = [
            Stretch(JobState.RUNNING, start_s + 0.1, stop.start_s),
            stop,
            Stretch(JobState.RUNNING, stop.end_s, end_s),
        ]
    return PastJob(JobId(name), tier, 4000, start_s, due_s, end_s, (waiting, *rest))


def stopped(name, start_s, beneficiary):
    stop = Stretch(JobState.SUSPENDED, start_s + 1, start_s + 1.25, beneficiary, "rescue", 524_288)
    return job(name, start_s, start_s + 3, stop=stop)


def page(at=ASKED_AT, **pasts):
    answers = {name: None if past is None else Heard(past, at) for name, past in pasts.items()}
    return html("a <model>", ASKED_AT, 60.0, answers, TIERS)


def test_it_says_who_made_way_for_whom_and_what_was_kept():
    jobs = (stopped("long", -9.0, "urgent"), job("urgent", -8.0, -7.75, PREMIUM, -7.0))
    written = page(one=ReplicaPast(-60.0, jobs))
    assert "background, 4,000 tokens" in written
    row = re.search(r"<tr><th scope=\"row\">background.*</tr>", written)[0]
    assert re.findall(r"<td>(.*?)</td>", row) == ["premium, 4,000 tokens", "rescue", "8.00", "250", "512"]
    assert written.count("data:image/svg+xml") == 2
    assert "a &lt;model&gt;" in written
    assert "from 11:59:30 until 2026-03-04 12:00:30" in written


def test_the_times_of_a_replica_count_from_its_answer():
    def began(at):
        written = page(at, one=ReplicaPast(-60.0, (job("short", -20.0, -1.0),)))
        pictures = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", written)
        return {found for each in pictures for found in re.findall(rb"seconds after [\d:]+", b64decode(each))}

    assert began(ASKED_AT) == {b"seconds after 12:00:10"}
    assert began(ASKED_AT + timedelta(seconds=8)) == {b"seconds after 12:00:18"}


def test_a_replica_without_requests_one_that_is_silent_and_one_that_forgot_say_so():
    forgot = ReplicaPast(-12.0, (job("short", -3.0, -1.0),))
    written = page(idle=ReplicaPast(-60.0, ()), silent=None, forgetful=forgot)
    assert "It had no request." in written
    assert "It does not answer." in written
    assert "It remembers the last 12.0 s." in written
    assert "None of its 1 requests was suspended." in written


def test_a_deployment_without_prefill_replicas_has_a_page():
    assert "no prefill replica" in page()


def test_suspensions_have_rows_before_what_only_ran():
    quiet = [job(f"quiet-{number}", -50.0 + number / 100, -1.0) for number in range(3 * MOST_ROWS)]
    pair = [stopped("long", -55.0, "urgent"), job("urgent", -54.0, -53.0, PREMIUM)]
    rows = _shown([*pair, *quiet])
    assert len(rows) == MOST_ROWS
    assert [row.job_id for row in rows[:2]] == ["long", "urgent"]


@pytest.mark.parametrize(("text", "value"), [("60s", 60), ("90", 90), ("5m", 300), ("1.5h", 5400)])
def test_times_are_read_as_people_write_them(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "soon", "-5s", "0s", "5 minutes"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(typer.BadParameter, match="write 60s, 5m or 1h"):
        seconds(text)


@pytest.mark.parametrize("text", ["20000000h", "86401s", "9" * 400])
def test_more_than_a_day_is_refused_before_anybody_is_asked(text):
    with pytest.raises(typer.BadParameter, match="at most 24h"):
        seconds(text)
    assert seconds("24h") == 86400
