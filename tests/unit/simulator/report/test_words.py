"""Sentences and numbers of the report."""

import pytest
from synthetic_findings import arm, findings

from simulator.findings import Findings
from simulator.report.tables import takeaway
from simulator.report.wording import level, milliseconds, number, percent, plain, rate, ratio

NO_BREAK = "\N{NO-BREAK SPACE}"
DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def said(made: Findings) -> str:
    return takeaway(made).replace(NO_BREAK, " ").replace(TIMES, "x")


def test_the_takeaway_compares_with_the_reference_and_the_next_best():
    assert said(findings()).startswith(
        "SlackServe serves 5.1 requests/s with 90 % in time, 4.8x FCFS and 1.07x the next best, "
        "S-EDF, suspend and resume. With 99 % in time it is 4.1 requests/s. "
    )
    assert "3.2 ms on average and 8.1 ms at the 99th percentile" in said(findings())


def test_the_takeaway_admits_that_another_is_better():
    better = arm("sedf-resume", goodput_rps={"0.90": 6.0})
    assert "0.85x the best, S-EDF, suspend and resume" in said(
        findings(arms=[arm("fcfs"), better, arm("slackserve")])
    )


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        ([arm("slackserve")], "SlackServe serves 5.1 requests/s with 90 % in time. With"),
        ([arm("fcfs"), arm("slackserve")], "in time, 4.8x FCFS. "),
        ([arm("fcfs", goodput_rps={}), arm("slackserve")], "in time, which FCFS does at no rate. "),
        (
            [arm("fcfs", goodput_rps={"0.90": 0.0}), arm("sedf"), arm("slackserve")],
            "in time, 2.2x the next best, S-EDF, no preemption; FCFS does so at no rate. ",
        ),
        ([arm("slackserve", goodput_rps={"0.90": 0.0})], "At none of the rates SlackServe has 90 % of"),
        (
            [arm("fcfs"), arm("sedf")],
            "S-EDF, no preemption serves 2.3 requests/s with 90 % in time, 2.2x FCFS.",
        ),
        ([arm("sedf-recompute")], "Work done again is 8.4 % of all work."),
    ],
)
def test_the_takeaway_of_less(arms, expected):
    assert expected in said(findings(arms=arms))


def test_numbers_have_three_digits_and_no_more():
    values = (0.0, 0.5, 5.1, 9.999, 12.345, 99.96, 4096, 12345.6, float("nan"), float("inf"), None)
    assert [number(value) for value in values] == [
        *("0.00", "0.50", "5.10", "10.0", "12.3", "100", "4,096", "12,346"),
        *(DASH, DASH, DASH),
    ]
    assert [plain(value) for value in (0.0, 0.5, 5.0, 10.0, 100, 1000)] == [
        "0",
        "0.5",
        "5",
        "10",
        "100",
        "1,000",
    ]


def test_attainment_is_never_rounded_up_to_all():
    assert percent(0.99996) == f"99.9{NO_BREAK}%"
    assert percent(1.0) == f"100{NO_BREAK}%"
    assert percent(None) == DASH


def test_ratios_levels_and_units():
    assert ratio(5.1, 1.06) == f"4.8{TIMES}"
    assert ratio(5.1, 4.77) == f"1.07{TIMES}"
    assert ratio(5.1, 0.0) == DASH
    assert level("0.90") == f"90{NO_BREAK}%"
    assert level("0.999") == f"99.9{NO_BREAK}%"
    assert rate(5.0) == f"5{NO_BREAK}requests/s"
    assert milliseconds(9999) == f"9,999{NO_BREAK}ms"
    assert milliseconds(90_000) == f"90{NO_BREAK}s"
