"""Which prefills had their replica for themselves, by what the replica reports."""

from dataclasses import replace

import pytest
from small_router import LINE, report, runs

from router.lone_prefills import ExpectedStop, Guess, LonePrefills
from slo.request import JobId, ReplicaId

WHERE = ReplicaId("prefill-0")
FIRST, SECOND = JobId("job-first"), JobId("job-second")


def told(*reports, second_at_s=None):
    """What reports, one a second, show of the first of two; the second follows then, None for never."""
    lone = LonePrefills()
    lone.goes_first(FIRST, WHERE, 2.0)
    if second_at_s is not None:
        lone.followed(SECOND, WHERE, second_at_s)
    shown = [lone.reported(each, float(at_s)) for at_s, each in enumerate(reports, start=1)]
    assert len(lone) <= 1
    return FIRST in shown, len(lone)


def first(tokens=1000):
    return runs("first", tokens)


def second(tokens=1000):
    return runs("second", tokens)


def ended(*jobs, still=()):
    return report(WHERE, *still, ended=jobs)


RUNS = report(WHERE, first(), second(), running=FIRST)


@pytest.mark.parametrize(
    ("reports", "second_at_s"),
    [
        ([RUNS, ended(SECOND, still=[first()])], 0.5),
        ([ended(SECOND, still=[first()])], 0.5),
        ([RUNS, ended(SECOND, still=[first()])], None),
        ([report(WHERE, second(), first(), running=SECOND)], 0.5),
        ([report(WHERE, second(), first(), running=SECOND)], None),
        ([report(WHERE, first(), second(0), running=FIRST)], 0.5),
        ([ended(FIRST, SECOND)], 1.5),
        ([ended(SECOND, FIRST)], 3.0),
    ],
    ids=[
        "overtaken",
        "before it was named",
        "by another router's",
        "runs",
        "ran",
        "rides",
        "shared",
        "order",
    ],
)
def test_who_was_held_up(reports, second_at_s):
    assert told(*reports, second_at_s=second_at_s) == (True, 0)


@pytest.mark.parametrize(
    ("reports", "second_at_s"),
    [
        ([ended(FIRST)], None),
        ([RUNS, ended(FIRST, still=[second()])], 0.5),
        ([RUNS, report(WHERE, first(0), second(), running=SECOND), ended(FIRST, still=[second()])], 0.5),
        ([ended(FIRST, SECOND)], 3.0),
        ([ended(JobId("earlier")), report(WHERE, first(), running=FIRST), ended(FIRST)], None),
        ([ended(JobId("earlier"), still=[first()]), ended(FIRST)], None),
        ([report(WHERE, second(), running=SECOND), report(WHERE, first()), ended(FIRST)], None),
    ],
    ids=["alone", "queued", "its answer is on its way", "late", "earlier", "before it came", "not yet there"],
)
def test_a_prefill_that_was_not_held_up_is_not_told_as_such(reports, second_at_s):
    assert told(*reports, second_at_s=second_at_s) == (False, 0)


WAITS = report(WHERE, first(), second(), running=SECOND)


@pytest.mark.parametrize(
    ("reports", "is_held_up"),
    [
        ([WAITS, RUNS, ended(FIRST, still=[second()])], False),
        ([report(WHERE, second(), running=SECOND), RUNS, ended(FIRST, still=[second()])], False),
        ([WAITS, WAITS, WAITS], True),
        ([WAITS, report(WHERE, first(), runs("third", 9), second(), running=JobId("job-third"))], True),
        ([WAITS, ended(SECOND, still=[first()])], True),
        ([WAITS, ended(SECOND, FIRST)], True),
        ([report(WHERE, second(), running=SECOND)] * 2 + [RUNS], True),
        ([report(WHERE, second(), running=SECOND)] * 2 + [replace(RUNS, running_for_s=0.5)], False),
    ],
    ids=["stopped", "later there", "not stopped", "other", "ended", "both", "stopped late", "in time"],
)
def test_who_was_held_up_although_another_was_to_be_stopped_for_it(reports, is_held_up):
    lone = LonePrefills()
    assert lone.goes_first(SECOND, WHERE, 9.0) is None
    assert lone.goes_first(FIRST, WHERE, 4.0, ExpectedStop(SECOND, start_by_s=2.5)) == SECOND, (
        "the other is held up"
    )
    shown = [lone.reported(each, float(at_s)) for at_s, each in enumerate(reports, start=1)]
    assert (FIRST in shown) is is_held_up


def test_nothing_is_kept_of_a_request_that_is_over():
    lone = LonePrefills()
    lone.goes_first(FIRST, WHERE, 2.0)
    lone.over(SECOND)
    assert len(lone) == 1
    lone.over(FIRST)
    assert len(lone) == 0
    assert lone.reported(ended(SECOND, still=[first()]), 3.0) is None


TEXT = Guess(LINE, 1000, 0, ("acme", 4000))
CACHED = Guess(LINE, 1000, 800)


@pytest.mark.parametrize(
    ("guess", "told", "longer_s", "is_sure"),
    [
        (TEXT, {"learned": (("acme", 4000, 4000),)}, 3.0, True),
        (TEXT, {"learned": (("acme", 4000, 400),)}, -0.6, True),
        (TEXT, {"learned": (("acme", 4000, 1500), ("acme", 4000, 9000))}, 0.5, True),
        (TEXT, {"learned": (("other", 4000, 4000), ("acme", 4001, 4000), ("acme", 4000, 0))}, 0.0, False),
        (TEXT, {}, 0.0, False),
        (CACHED, {"hits": ((FIRST, 0),)}, 0.8, True),
        (CACHED, {"hits": ((FIRST, 800), (FIRST, 0))}, 0.0, True),
        (CACHED, {"hits": ((SECOND, 0),)}, 0.0, False),
        (replace(CACHED, cached_tokens=0), {"hits": ((FIRST, 800),)}, -0.8, True),
        (replace(CACHED, cached_tokens=0), {}, 0.0, True),
    ],
    ids=["longer", "shorter", "first", "others", "untold", "evicted", "again", "not its", "warm", "exact"],
)
def test_what_a_replica_tells_of_a_prefill_that_was_guessed(guess, told, longer_s, is_sure):
    lone = LonePrefills()
    lone.goes_first(FIRST, WHERE, 2.0, guess=guess)
    its = report(WHERE, first(), running=FIRST, **told)
    assert lone.corrected(its) == (FIRST, pytest.approx(longer_s))
    assert lone.corrected(its) == (FIRST, 0.0), "what was told before is no news"
    assert lone.reported(its, 1.0) is None
    assert lone.reported(ended(FIRST), 2.0 + longer_s) == (None if is_sure else FIRST)


def test_a_request_that_is_over_before_its_replica_has_told_what_it_computed():
    lone = LonePrefills()
    lone.goes_first(FIRST, WHERE, 2.0, guess=TEXT)
    assert not lone.over(FIRST)
    lone.goes_first(SECOND, WHERE, 2.0, guess=replace(TEXT, text=None))
    assert lone.over(SECOND)


def test_who_shared_the_pass_of_a_prefill_that_was_longer_than_guessed():
    lone = LonePrefills()
    lone.goes_first(FIRST, WHERE, 2.0, guess=TEXT)
    lone.corrected(report(WHERE, first(), running=FIRST, learned=(("acme", 4000, 4000),)))
    lone.followed(SECOND, WHERE, 3.0)
    assert lone.reported(ended(FIRST, SECOND), 5.5) == FIRST


def test_a_prefill_that_has_not_come_by_the_time_another_goes_first_says_nothing():
    lone = LonePrefills()
    lone.goes_first(FIRST, WHERE, 2.0)
    assert lone.goes_first(SECOND, WHERE, 9.0) == FIRST
