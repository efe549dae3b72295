"""What `slackserve bench` prints can be read at any width."""

import io

import pytest
from rich.console import Console

from deployments.bench.answer import Answer, Ended, Fate, Offered
from deployments.bench.score import score
from deployments.bench.search import Goodput
from deployments.bench.view import goodput_line, print_table
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, PREMIUM


def ended(kind, tier, ttft_s):
    arrival = Arrival(0, 0.0, kind, 100, 10, 1.0, tier)
    return Ended(arrival, Answer(Fate.ANSWERED, 0.0, 1.0, "", ttft_s, 0.5, 1000), 0.0)


RUN = [ended("conversation", PREMIUM, 12.345), ended("document", BACKGROUND, 49.876)] * 2000


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_every_row_has_its_name_and_all_its_numbers(width, is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, color_system=None, width=width)
    print_table(console, score(Offered(RUN, wall_s=60.0)))
    lines = console.file.getvalue().splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    times = "49876/49876/49876", "500/500/500"
    assert rows["background"] == rows["document"] == ["2000", "0.0%", *times, "0", "0", "36,667"]
    assert {"all", "premium", "conversation"} <= {*rows}


def test_a_table_that_fits_the_usual_terminal_is_no_wider():
    console = Console(file=io.StringIO(), width=80)
    quick = [ended("conversation", PREMIUM, 0.5), ended("document", BACKGROUND, 0.75)] * 2000
    print_table(console, score(Offered(quick, wall_s=60.0)))
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (Goodput(2.0, is_bounded=True), "goodput at 90%: 2.000 requests/s"),
        (Goodput(2.0, is_bounded=False), "goodput at 90%: at least 2.000 requests/s"),
        (Goodput(None, is_bounded=True), "goodput at 90%: less than --min-rate"),
        (
            Goodput(None, is_bounded=False),
            "goodput at 90%: unknown, as the client was too slow for --min-rate",
        ),
    ],
)
def test_what_a_search_says_of_what_it_found(found, line):
    assert goodput_line(found, 0.9) == line
