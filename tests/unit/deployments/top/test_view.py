"""What `slackserve top` draws."""

import io
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from deployments.top.frame import DecodeRow, Frame, PrefillRow
from deployments.top.view import view

TIERS = ("premium", "standard", "background")


def draw(frame, *, width=100, height=None, colour=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="standard" if colour else None
    )
    console.print(view(frame, height))
    return console.file.getvalue()


def line_with(text, drawn):
    (line,) = (line for line in drawn.splitlines() if text in line)
    return line


def frame(*prefill, ready=True, decode=()):
    return Frame("tiny", datetime(2030, 1, 2, 13, 4, 5, tzinfo=UTC), ready, prefill, decode, TIERS)


def prefill(work, *, replica="aaaa", reports=True, silent_s=0.3):
    return PrefillRow(replica, work, reports, silent_s, 7, 12_345, 0.42)


def job(name, tier="standard", tokens=1000, budget_s=None, **more):
    return {"job": name, "tier": tier, "tokens": tokens, "budget_s": budget_s, **more}


def waiting(name, tier="standard", tokens=1000, budget_s=None, slack_s=None):
    return job(name, tier, tokens, budget_s, slack_s=slack_s)


def step(*jobs, tokens=4000, progress=0.25, running_for_s=0.1, remaining_s=0.75):
    return {
        "step_id": 9,
        "jobs": list(jobs),
        "tokens": tokens,
        "progress": progress,
        "running_for_s": running_for_s,
        "remaining_s": remaining_s,
    }


def stopped(*jobs, preempted_by):
    return {
        "jobs": list(jobs),
        "progress": 0.4,
        "tokens": 3900,
        "bytes": 3 * 2**20,
        "for_s": 1.5,
        "preempted_by": preempted_by,
    }


def work(running=None, queue=(), suspended=(), *, preemptible=True):
    return {
        "preemptible": preemptible,
        "step": running,
        "queue": list(queue),
        "suspended": list(suspended),
    }


def test_the_header_says_what_is_served_whether_it_is_ready_and_when_that_was():
    first = draw(frame(prefill(work()))).splitlines()[0]
    assert first.startswith("SlackServe  tiny  ready")
    assert first.rstrip().endswith("13:04:05")
    assert "not ready" in draw(frame(ready=False))


def test_a_running_step_has_a_bar_of_its_progress_its_tokens_and_the_time_to_go():
    quarter, half = (
        line_with("first", draw(frame(prefill(work(step(job("first"), progress=progress))))))
        for progress in (0.25, 0.5)
    )
    assert "25%" in quarter
    assert "4,000" in quarter
    assert "0.75 s" in quarter
    assert "standard" in quarter
    assert half.count("━") == 2 * quarter.count("━") > 0


def test_a_step_of_many_counts_its_tiers():
    running = step(job("a", "premium"), job("b", "background"), job("c", "background"))
    assert "1 premium, 2 background" in draw(frame(prefill(work(running))))


def test_the_progress_of_a_step_that_cannot_be_stopped_is_estimated_from_its_time():
    running = step(job("whole"), progress=0.0, running_for_s=0.3, remaining_s=0.4)
    drawn = draw(frame(prefill(work(running, preemptible=False))))
    assert "≈ 75%" in line_with("whole", drawn)
    assert "≈ 0.10 s" in line_with("whole", drawn)
    assert "steps cannot be stopped" in drawn


def test_work_without_jobs_is_warm_up():
    assert "warm-up" in draw(frame(prefill(work(step()))))


def test_the_queue_shows_tier_tokens_budget_and_slack_in_its_order():
    queue = [
        waiting("in-time", "premium", 64, 2.0, 1.5),
        waiting("late", "standard", 2000, 0.5, -0.25),
        waiting("endless", "background", 32_000),
    ]
    drawn = draw(frame(prefill(work(queue=queue))))
    assert "waiting (3)" in drawn
    assert line_with("in-time", drawn).split()[1:8] == ["premium", "64", "2.00", "s", "+1.50", "s", "in-time"]
    assert line_with("late", drawn).split()[1:8] == ["standard", "2,000", "0.50", "s", "-0.25", "s", "late"]
    assert line_with("endless", drawn).split()[1:6] == ["background", "32,000", "none", "none", "endless"]
    assert drawn.index("in-time") < drawn.index("late") < drawn.index("endless")


@pytest.mark.parametrize(("slack_s", "colour"), [(0.0, "\x1b[32m"), (0.5, "\x1b[32m"), (-0.5, "\x1b[31m")])
def test_slack_is_green_as_long_as_there_is_some_and_red_after(slack_s, colour):
    queue = [waiting("urgent", "premium", 64, 1.0, slack_s)]
    shown = f"{'-' if slack_s < 0 else '+'}{abs(slack_s):.2f} s"
    assert f"{colour}{shown}" in line_with("urgent", draw(frame(prefill(work(queue=queue))), colour=True))


@pytest.mark.parametrize(("length", "shown"), [(20, 20), (21, 19), (500, 19)])
def test_a_long_queue_is_cut_and_says_how_many_there_are(length, shown):
    queue = [waiting(f"job-{number}") for number in range(length)]
    drawn = draw(frame(prefill(work(queue=queue))))
    assert f"waiting ({length})" in drawn
    assert drawn.count("job-") == shown
    assert (f"… and {length - shown} more" in drawn) == (length > shown)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_queues_are_cut_so_that_everything_fits_into_the_terminal(replicas):
    queue = [waiting(f"job-{number}") for number in range(100)]
    busy = work(step(job("first")), queue, [stopped(job("old"), preempted_by="first")])
    decode = DecodeRow("dddd", True, 0.1, 3, 0.1)
    drawn = draw(frame(*[prefill(busy)] * replicas, decode=(decode,)), height=40)
    assert 40 - replicas < len(drawn.splitlines()) <= 40
    assert drawn.count("more") == replicas


def test_what_is_suspended_shows_its_progress_since_when_what_it_keeps_and_for_whom():
    old = job("old", "background", 3900)
    running = step(job("urgent", "premium"))
    drawn = draw(
        frame(prefill(work(running, [{**old, "slack_s": None}], [stopped(old, preempted_by="urgent")])))
    )
    row = line_with("3.0 MiB", drawn)
    assert "background" in row
    assert "40%" in row
    assert "3,900" in row
    assert "1.50 s" in row
    assert "premium urgent" in row
    assert "suspended old" in drawn, "it is marked in the queue"


def test_what_was_stopped_for_nobody_says_so():
    assert "nobody" in draw(frame(prefill(work(suspended=[stopped(job("old"), preempted_by="")]))))


def test_a_replica_that_does_not_answer_is_shown_with_what_was_last_known_of_it():
    lost = prefill(None, replica="lost", reports=False, silent_s=12.0)
    drawn = draw(frame(lost, prefill(work(), replica="well")))
    assert "not answering; last report 12 s ago: 7 outstanding, 12,345 tokens" in drawn
    assert "prefill lost" in drawn
    assert "prefill well" in drawn
    assert drawn.count("not answering") == 1


def test_a_replica_that_answers_but_does_not_report_is_marked():
    assert "no report for 12 s" in draw(frame(prefill(work(), reports=False, silent_s=12.0)))
    assert "no report" not in draw(frame(prefill(work())))


def test_an_idle_replica_says_so():
    drawn = draw(frame(prefill(work())))
    assert "idle" in drawn
    assert "KV 42%" in drawn
    assert "waiting" not in drawn
    assert "suspended" not in drawn


def test_decode_replicas_show_kv_use_running_requests_and_when_they_reported():
    well, lost = DecodeRow("well", True, 0.2, 5, 0.5), DecodeRow("lost", False, 15.0, 2, 0.25)
    drawn = draw(frame(decode=(well, lost)))
    assert line_with("well", drawn).split() == ["well", "━" * 8, "50%", "5", "0.20", "s", "ago"]
    assert "25%" in line_with("lost", drawn)
    assert "not answering for 15 s" in line_with("lost", drawn)


def test_without_any_replica_it_says_what_is_missing():
    drawn = draw(frame(ready=False))
    assert "prefill: no replica has reported yet" in drawn
    assert "decode: no replica has reported yet" in drawn


def test_a_router_that_does_not_answer_does_not_hide_the_replicas():
    drawn = draw(frame(prefill(work(queue=[waiting("one-job")])), ready=None))
    assert "router not answering" in drawn
    assert "prefill aaaa" in drawn
    assert "one-job" in drawn
    assert "decode: unknown until the router answers" in drawn


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_are_never_read_as_markup_and_lines_never_wrap(width):
    name = "[red]" + 120 * "x"
    drawn = draw(frame(prefill(work(step(job(name)), [waiting(name, "premium", 64, 1.0, 0.5)]))), width=width)
    assert max(map(len, drawn.splitlines())) <= width
    assert len(drawn.splitlines()) == 8
    if width == 200:
        assert name in drawn


# The SLO monitor


def monitor(**more):
    def tier(attained, *, at_risk=False):
        return {
            "target": 0.99,
            "attained": attained,
            "judged": 10,
            "burn": {"short": 4.0, "long": 2.0},
            "goodput_per_s": 1.0,
            "headroom": 0.5,
            "ttft": None if attained is None else {"p50": 0.1, "p95": 0.2, "p99": 12.0},
            "at_risk": at_risk,
        }

    return {
        "policy": {"version": 12, "shed": {"background": 0.5}, "reserved": 0.15},
        "reason": "top_tier_at_risk",
        "tiers": {"premium": tier(0.925, at_risk=True), "standard": tier(1.0), "background": tier(None)},
        "error": {"samples": 9, "mape": 0.04, "p90": 0.12},
        "ttft_error": {"samples": 7, "mape": 0.06, "p90": 0.14},
        **more,
    }


def monitored(state):
    return replace(frame(prefill(work())), monitored=True, monitor=state)


def test_the_monitor_shows_attainment_burn_rates_shed_levels_policy_and_prediction_error():
    drawn = draw(monitored(monitor()))
    assert "burn, long  burn, short" in line_with("attained", drawn)
    assert line_with("92.5%", drawn).split()[:6] == ["premium", "99.0%", "92.5%", "2.0", "4.0", "0%"]
    assert "0.10 s, 0.20 s, 12 s" in line_with("92.5%", drawn)
    assert line_with("background", drawn).split()[1:6] == ["99.0%", "-", "2.0", "4.0", "50%"]
    assert "policy 12" in drawn
    assert "top tier at risk" in drawn
    assert "15% reserved" in drawn
    assert "predictions off by 4%, p90 12%  first tokens 6%, p90 14%" in drawn


def test_a_monitor_that_does_not_answer_leaves_the_picture_as_high_as_it_was():
    answering = monitor()
    still = monitor(error=None, policy={**answering["policy"], "reserved": 0.0})
    heights = {len(draw(monitored(state)).splitlines()) for state in (answering, still, None)}
    assert len(heights) == 1
    assert "not answering" in line_with("SLO monitor", draw(monitored(None)))


def test_without_a_monitor_there_is_no_word_of_it():
    assert "SLO" not in draw(frame(prefill(work())))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_monitor_never_wraps(width):
    heights = {len(draw(monitored(monitor()), width=each).splitlines()) for each in (width, 500)}
    assert len(heights) == 1


def test_queues_leave_room_for_the_monitor():
    queue = [waiting(f"job {number}") for number in range(100)]
    height = 30
    crowded = replace(monitored(monitor()), prefill=(prefill(work(step(job("r")), queue)),))
    assert len(draw(crowded, height=height).splitlines()) <= height


def test_tiers_are_those_of_the_deployment_in_their_order():
    each = monitor()["tiers"]["standard"]
    state = monitor(tiers={"file": each, "text": each}, policy={"version": 1, "shed": {}, "reserved": 0.0})
    drawn = draw(replace(monitored(state), tiers=("text", "image", "file"))).splitlines()
    first = next(number for number, line in enumerate(drawn) if line.startswith("SLO"))
    rows = [line.split() for line in drawn[first + 1 : first + 4]]
    assert [row[0] for row in rows] == ["text", "image", "file"]
    assert rows[1][1] == "-", "the monitor does not know it yet"
