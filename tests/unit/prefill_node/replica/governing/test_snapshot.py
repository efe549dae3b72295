"""What a replica tells the router and people about its work."""

import math

import pytest
from governors import BOUNDARIES, NOTHING_REACHED, governor_of, ledger_of
from published import Account, Engine
from published import running as running_step
from published import suspended as suspended_step

from prefill_node.board.messages import Reached
from prefill_node.replica.governing.ledger import Accepted
from prefill_node.replica.governing.snapshot import load, snapshot
from slo.preemption.types import Limits, PreemptionRules
from slo.queue.slack import NO_DEADLINE
from slo.reports import OutstandingJob
from slo.request import JobId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

NOW_S = 100.0
ENGINE = Engine()
view = ENGINE.view


def job(name, tokens=1000, deadline_s=NO_DEADLINE, tier=BACKGROUND):
    return ENGINE.knows(Accepted(JobId(name), tier, tokens, deadline_s, 0.0))


def governor(*jobs, boundaries=BOUNDARIES, **limits):
    return governor_of(ledger_of(*jobs), PreemptionRules(limits=Limits(**limits)), boundaries)


def running(*jobs, started_s=99.0, **about):
    return running_step(*jobs, started_s=started_s, **about)


def suspended(*jobs, boundary=4, **about):
    return suspended_step(*jobs, boundary=boundary, since_s=98.0, **about)


job("a"), job("b"), job("c")


def left(told):
    return {job.job_id: job.tokens for job in told.jobs}


# For the router

TOKENS = {
    "nothing is known yet": (None, {"a": 1000, "b": 1000, "c": 1000}),
    "all wait": (view(), {"a": 1000, "b": 1000, "c": 1000}),
    "one runs": (view(running("a")), {"a": 1000, "b": 1000, "c": 1000}),
    "two run together": (view(running("b", "a", tokens=2000)), {"a": 0, "b": 2000, "c": 1000}),
    "one is suspended": (view(None, suspended("a")), {"a": 600, "b": 1000, "c": 1000}),
    "two are suspended together": (
        view(running("c"), suspended("b", "a", tokens=2000)),
        {"a": 0, "b": 1200, "c": 1000},
    ),
    "one waits between two chunks": (
        view(running("b"), a=Account(1, 0.0, 700)),
        {"a": 300, "b": 1000, "c": 1000},
    ),
    "one with a suspended step that starts over": (
        view(None, suspended("a", boundary=0)),
        {"a": 1000, "b": 1000, "c": 1000},
    ),
    "the engine has jobs that have ended here": (
        view(running("gone", "b", tokens=1500), suspended("gone-too"), gone=Account(1, 0.0, 5)),
        {"a": 1000, "b": 1500, "c": 1000},
    ),
}


@pytest.mark.parametrize(("shown", "expected"), TOKENS.values(), ids=TOKENS.keys())
def test_tokens_still_to_compute(shown, expected):
    assert left(load(governor(job("a"), job("b"), job("c")), shown, NOTHING_REACHED, NOW_S)) == expected


def test_what_waits_for_a_place_is_told_last_with_all_its_work():
    governed = governor(job("a"), job("b"))
    governed.ledger.came(Accepted(JobId("c"), PREMIUM, 1000, NOW_S + 5.0, 99.0, cached_tokens=400))
    told = load(governed, view(running("b")), NOTHING_REACHED, NOW_S)
    assert list(left(told)) == ["b", "a", "c"]
    assert told.jobs[-1] == OutstandingJob(JobId("c"), PREMIUM, 600, 5.0, pytest.approx(0.6))


@pytest.mark.parametrize(
    ("shown", "accounts"),
    [
        ((running("long", tokens=1000),), {"long": Account(0, 0.0, 1000)}),
        ((None, suspended("long", tokens=1000, boundary=0)), {"long": Account(1, 0.0, 0)}),
    ],
    ids=["its first chunk runs", "its first chunk is suspended"],
)
def test_the_chunks_behind_the_one_that_runs_are_still_to_compute(shown, accounts):
    governed = governor(job("long", tokens=5000))
    assert left(load(governed, view(*shown, **accounts), NOTHING_REACHED, NOW_S)) == {"long": 5000}


@pytest.mark.parametrize(
    ("from_boundary", "reached", "done_s"),
    [
        (0, NOTHING_REACHED, 0.0),
        (0, Reached(7, 3), 0.3),
        (0, Reached(6, 3), 0.0),
        (5, Reached(6, 3), 0.5),
        (5, Reached(7, 8), 0.8),
    ],
    ids=["just issued", "under way", "the step before was", "resumed", "resumed, under way"],
)
def test_the_running_pass_is_credited_with_its_progress_and_not_with_its_time(from_boundary, reached, done_s):
    shown = view(running("a", from_boundary=from_boundary, started_s=10.0))
    told = load(governor(job("a")), shown, reached, NOW_S)
    assert told.running == "a"
    assert told.running_for_s == pytest.approx(done_s)


def test_a_pass_whose_clients_have_left_is_not_told():
    told = load(governor(job("a")), view(running("gone")), NOTHING_REACHED, NOW_S)
    assert (told.running, told.running_for_s, told.preemptible_in_s) == (None, 0.0, None)


def test_budgets_are_what_is_left_of_the_deadlines():
    told = load(
        governor(job("a", deadline_s=103.5), job("b"), job("c", deadline_s=99.0)), None, Reached(0, 0), NOW_S
    )
    assert {each.job_id: each.budget_s for each in told.jobs} == {"a": 3.5, "b": None, "c": -1.0}
    assert [each.tier for each in told.jobs] == [BACKGROUND] * 3


@pytest.mark.parametrize(
    ("rest", "preemptible_in_s"),
    [
        ({}, 0.05),  # half of a stretch
        ({"max_preemptions": 0}, None),
        ({"max_suspended_s": 1.0}, None),
        ({"max_suspended_steps": 0}, None),
        ({"max_suspended_bytes": 1}, None),
        ({"boundaries": 0}, None),
    ],
)
def test_the_router_learns_how_soon_the_pass_would_make_way_unless_a_limit_is_reached(rest, preemptible_in_s):
    shown = view(running("a"), a=Account(1, 2.0, 1000))
    assert load(governor(job("a"), **rest), shown, Reached(7, 3), NOW_S).preemptible_in_s == (
        None if preemptible_in_s is None else pytest.approx(preemptible_in_s)
    )


@pytest.mark.parametrize(
    ("rest", "reached", "preemptible_in_s"),
    [
        ({}, NOTHING_REACHED, 0.05),
        ({}, Reached(7, 9), 0.1),
        ({"boundaries": 0}, NOTHING_REACHED, 1.0),
        ({"max_preemptions": 0}, Reached(7, 3), 0.7),
    ],
    ids=["it stops before", "it ends sooner than a stop", "nothing stops it", "a limit is reached"],
)
def test_behind_a_chunk_the_queue_is_ordered_anew(rest, reached, preemptible_in_s):
    governed = governor(job("long", tokens=6000), **rest)
    told = load(governed, view(running("long"), long=Account(0, 0.0, 1000)), reached, NOW_S)
    assert told.preemptible_in_s == pytest.approx(preemptible_in_s)
    assert told.jobs[0].work_s + told.running_for_s == pytest.approx(6.0), "with all that lies behind it"


# For people


def test_before_the_engine_has_published_anything():
    assert snapshot(governor(job("a")), None, NOTHING_REACHED, NOW_S) == {
        "preemptible": False,
        "step": None,
        "queue": [],
        "suspended": [],
    }


def test_the_step_the_queue_and_what_is_suspended():
    governed = governor(
        job("a", deadline_s=NO_DEADLINE),
        job("b", 500, deadline_s=102.0, tier=PREMIUM),
        job("c", 100, deadline_s=101.0, tier=STANDARD),
    )
    shown = snapshot(
        governed, view(running("a"), suspended("b", tokens=500, preempted_by="c")), Reached(7, 3), NOW_S
    )
    assert shown["preemptible"] is True
    step = shown["step"]
    assert step["jobs"] == [{"job": "a", "tier": "background", "tokens": 1000, "budget_s": None}]
    assert (step["progress"], step["running_for_s"]) == (0.3, 1.0)
    assert step["remaining_s"] == pytest.approx(0.7)
    assert [(each["job"], each["slack_s"]) for each in shown["queue"]] == [
        ("c", pytest.approx(0.9)),
        ("b", pytest.approx(1.7)),
    ]
    assert shown["suspended"] == [
        {
            "jobs": [{"job": "b", "tier": "premium", "tokens": 500, "budget_s": 2.0}],
            "progress": 0.4,
            "tokens": 500,
            "bytes": 500,
            "for_s": 2.0,
            "preempted_by": "c",
        }
    ]


def test_jobs_that_are_not_known_here_are_shown_by_their_name_only():
    step = snapshot(governor(), view(running("gone")), NOTHING_REACHED, NOW_S)["step"]
    assert step["jobs"] == [{"job": "gone", "tier": "", "tokens": 0, "budget_s": None}]


def test_nothing_infinite_leaves_the_replica():
    governed = governor(job("a"), job("b"))
    shown = snapshot(governed, view(running("a"), suspended("b")), NOTHING_REACHED, NOW_S)

    def numbers(value):
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, list):
            return [value] if isinstance(value, float) else []
        return [number for item in value for number in numbers(item)]

    assert all(math.isfinite(number) for number in numbers(shown))
