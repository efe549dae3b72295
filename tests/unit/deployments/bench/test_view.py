"""What `slackserve bench` prints can be read at any width."""

import io

import pytest
from rich.console import Console

from deployments.bench.answer import Answer, Ended, Fate, Offered
from deployments.bench.score import score
from deployments.bench.search import Goodput
from deployments.bench.view import goodput_line, print_table, remarks
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


def test_of_those_that_failed_the_reader_learns_what_the_server_said_first():
    arrival = Arrival(0, 0.0, "conversation", 100, 10, 1.0, PREMIUM)
    texts = (
        ("400 invalid_value", "token id 300 is not in the vocabulary"),
        ("400 invalid_value", "later"),
        ("in the stream: boom", "boom"),
        ("timeout", ""),
    )
    failed = [Answer(Fate.FAILED, 0.0, 1.0, reason, said=said) for reason, said in texts]
    run = [Ended(arrival, answer, 0.0) for answer in (*failed, Answer(Fate.REFUSED, 0.0, 1.0, "429 backlog"))]
    result = score(Offered(run, wall_s=1.0))
    assert result.said == {
        "400 invalid_value": "token id 300 is not in the vocabulary",
        "in the stream: boom": "boom",
    }
    assert remarks(result) == [
        "1 refused: 429 backlog",
        "2 failed: 400 invalid_value: token id 300 is not in the vocabulary",
        "1 failed: in the stream: boom",
        "1 failed: timeout",
        "400: for a model with fewer tokens give --vocabulary, for a server with other tiers --tiers",
    ]
    only_refused = score(Offered([run[-1]], wall_s=1.0))
    assert remarks(only_refused) == ["1 refused: 429 backlog"]


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
