"""Which request counts as met, missed or not judged."""

import math
from dataclasses import replace

import pytest

from slo.outcomes import Outcome, RequestEnded
from slo.tiers import PREMIUM, ObjectiveName

OK = RequestEnded(
    model="m",
    tier=PREMIUM,
    tenant="acme",
    outcome=Outcome.FINISHED,
    e2e_s=1.0,
    ttft_s=0.1,
    ttft_budget_s=0.2,
    tpot_s=0.01,
    tpot_budget_s=0.03,
)
LATE = replace(OK, ttft_s=0.3)
LEFT = replace(OK, outcome=Outcome.CANCELLED)
WHOLE = replace(OK, ttft_s=None, tpot_s=None, streamed=False)
OWED = replace(OK, ttft_budget_s=math.inf, tpot_s=None, tpot_budget_s=None)
"""It was promised a first token, and nobody has worked out by when."""

JUDGED = {
    "in time": (OK, True),
    "just in time": (replace(OK, ttft_s=0.2), True),
    "first token late": (LATE, False),
    "tokens too slow": (replace(OK, tpot_s=0.04), False),
    "only its pace is promised": (replace(LATE, ttft_budget_s=None), True),
    "nothing is promised": (replace(LATE, ttft_budget_s=None, tpot_budget_s=None), None),
    "nothing could be timed": (replace(OK, ttft_s=None, tpot_s=None), True),
    "refused for want of capacity": (replace(OK, outcome=Outcome.SHED, ttft_s=None, tpot_s=None), False),
    "failed after a timely first token": (replace(OK, outcome=Outcome.FAILED), False),
    "malformed": (replace(OK, outcome=Outcome.REJECTED, ttft_s=None, tpot_s=None), None),
    "ended late": (replace(OK, e2e_budget_s=0.9), False),
    "ended in time": (replace(OK, ttft_budget_s=None, tpot_budget_s=None, e2e_budget_s=1.0), True),
    "left in good time": (LEFT, None),
    "left before its end was due": (replace(LEFT, e2e_budget_s=1.1), None),
    "left when its end was overdue": (replace(LEFT, e2e_budget_s=0.9), False),
    "left after a late first token": (replace(LEFT, ttft_s=0.3), False),
    "left before anything was due": (replace(LEFT, ttft_s=None, tpot_s=None, e2e_s=0.1), None),
    "left when the first token was overdue": (replace(LEFT, ttft_s=None, tpot_s=None, e2e_s=0.3), False),
    "left without ever being streamed to": (
        replace(LEFT, ttft_s=None, tpot_s=None, e2e_s=0.3, streamed=False),
        None,
    ),
    "answered as a whole": (WHOLE, True),
    "answered as a whole, in time": (replace(WHOLE, e2e_budget_s=1.0), True),
    "answered as a whole, late": (replace(WHOLE, e2e_budget_s=0.9), False),
    "answered as a whole, nothing promised": (replace(WHOLE, ttft_budget_s=None, tpot_budget_s=None), None),
    "refused before it was answered as a whole": (replace(WHOLE, outcome=Outcome.SHED), False),
    "failed instead of an answer as a whole": (replace(WHOLE, outcome=Outcome.FAILED), False),
    "malformed, to be answered as a whole": (replace(WHOLE, outcome=Outcome.REJECTED), None),
    "left an answer as a whole that was overdue": (
        replace(WHOLE, outcome=Outcome.CANCELLED, e2e_budget_s=0.9),
        False,
    ),
    "in time by nobody's budget": (OWED, True),
    "refused before a budget was worked out": (replace(OWED, outcome=Outcome.SHED, ttft_s=None), False),
    "failed with a budget of nobody's": (replace(OWED, outcome=Outcome.FAILED), False),
    "left with a budget of nobody's": (replace(OWED, outcome=Outcome.CANCELLED, ttft_s=None), None),
}


@pytest.mark.parametrize(("ended", "attained"), JUDGED.values(), ids=JUDGED)
def test_what_counts_as_met(ended, attained):
    assert ended.attained is attained


TTFT, TPOT, E2E = ObjectiveName


@pytest.mark.parametrize(
    ("ended", "judged"),
    {
        "each by itself": (LATE, {TTFT: False, TPOT: True}),
        "only what is promised": (replace(OK, tpot_budget_s=None), {TTFT: True}),
        "only what was timed": (replace(OK, tpot_s=None), {TTFT: True}),
        "all are missed by a failure": (replace(OK, outcome=Outcome.FAILED), {TTFT: False, TPOT: False}),
        "a refusal misses what was promised": (
            replace(OK, outcome=Outcome.SHED, ttft_s=None, tpot_s=None, tpot_budget_s=None),
            {TTFT: False},
        ),
        "the end by itself": (replace(LATE, e2e_budget_s=1.0), {TTFT: False, TPOT: True, E2E: True}),
        "what a client that left had missed": (replace(LEFT, tpot_s=0.04), {TPOT: False}),
        "a malformed request none": (replace(OK, outcome=Outcome.REJECTED), {}),
        "of an answer as a whole its end alone": (replace(WHOLE, e2e_budget_s=1.0), {E2E: True}),
        "tokens that nobody would have timed are not missed": (
            replace(WHOLE, outcome=Outcome.FAILED, e2e_budget_s=1.0),
            {E2E: False},
        ),
        "no first token met a budget of nobody's": (OWED, {}),
        "a refusal misses what nobody has worked out": (
            replace(OWED, outcome=Outcome.SHED, ttft_s=None),
            {TTFT: False},
        ),
        "met with all that was unread": (
            replace(OK, e2e_budget_s=2.0, unread_s=1.0, tpot_unread_s=0.02),
            {TTFT: True, TPOT: True, E2E: True},
        ),
        "missed or not, by when its client has read": (
            replace(OK, e2e_budget_s=1.9, unread_s=1.0, tpot_unread_s=0.03),
            {TTFT: True},
        ),
        "missed without any of it": (
            replace(OK, e2e_budget_s=0.9, tpot_budget_s=0.009, unread_s=1.0, tpot_unread_s=1.0),
            {TTFT: True, TPOT: False, E2E: False},
        ),
        "a failure misses them however slowly its client reads": (
            replace(OK, outcome=Outcome.FAILED, tpot_unread_s=1.0),
            {TTFT: False, TPOT: False},
        ),
    }.values(),
)
def test_which_objectives_are_judged(ended, judged):
    assert ended.judged == judged


REFUSED = replace(OK, outcome=Outcome.SHED, ttft_s=None, tpot_s=None)


@pytest.mark.parametrize(
    ("ended", "out_of_reach", "attained"),
    {
        "nothing is out of reach": (LATE, (), False),
        "what was missed is": (LATE, (TTFT,), True),
        "all that was promised is": (replace(LATE, tpot_budget_s=None), (TTFT,), None),
        "what was met is": (LATE, (TPOT,), False),
        "refused, with something in reach": (REFUSED, (TPOT,), False),
        "refused, with nothing in reach": (REFUSED, (TTFT, TPOT), None),
        "left when that was missed": (replace(LEFT, ttft_s=0.3), (TTFT,), None),
        "answered as a whole": (WHOLE, (TTFT,), True),
        "failed": (replace(OK, outcome=Outcome.FAILED), (), None),
        "failed before its first token": (replace(OK, outcome=Outcome.FAILED, ttft_s=None), (TPOT,), None),
        "malformed": (replace(OK, outcome=Outcome.REJECTED), (TTFT,), None),
    }.values(),
)
def test_what_the_fleet_is_steered_by(ended, out_of_reach, attained):
    told = replace(ended, unattainable=out_of_reach)
    assert told.attained_in_reach is attained
    assert told.attained is ended.attained, "what people see counts all"


LACKED = replace(OK, outcome=Outcome.SHED, ttft_s=None, tpot_s=None, up_to_decode=True)


@pytest.mark.parametrize(
    ("ended", "in_time"),
    {
        "in time": (OK, True),
        "late": (LATE, False),
        "failed after a timely first token": (replace(OK, outcome=Outcome.FAILED), True),
        "ended by others after a late one": (replace(LATE, outcome=Outcome.EVICTED), False),
        "failed before it": (replace(OK, outcome=Outcome.FAILED, ttft_s=None), False),
        "failed after one that nobody has worked out": (replace(OWED, outcome=Outcome.FAILED), None),
        "refused for want of prefill": (replace(LACKED, up_to_decode=False), False),
        "refused for want of memory on decode": (LACKED, None),
        "late, as only decode could compute it": (replace(LATE, up_to_decode=True), None),
        "in time, as decode computed it": (replace(OK, up_to_decode=True), None),
        "left when it was late for decode": (replace(LEFT, ttft_s=0.3, up_to_decode=True), None),
        "failed instead of an answer as a whole": (replace(WHOLE, outcome=Outcome.FAILED), None),
        "malformed": (replace(LACKED, outcome=Outcome.REJECTED, up_to_decode=False), None),
        "late, as it would be alone": (replace(LATE, unattainable=(TTFT,)), None),
        "late, and too slow in any case": (replace(LATE, unattainable=(TPOT,)), False),
    }.values(),
)
def test_what_counts_against_prefill(ended, in_time):
    assert ended.prefilled_in_time is in_time


@pytest.mark.parametrize(
    ("ended", "used"),
    {
        "the worst objective counts": (replace(OK, e2e_budget_s=1.25), 0.8),
        "an answer that did not end says nothing of its end": (replace(LEFT, e2e_budget_s=1.0), 0.5),
        "nothing was timed": (
            replace(OK, outcome=Outcome.SHED, ttft_s=None, tpot_s=None, e2e_budget_s=1.0),
            None,
        ),
        "nobody knows of how much": (OWED, None),
    }.values(),
)
def test_how_much_of_what_was_promised_was_used(ended, used):
    assert ended.budget_used == (None if used is None else pytest.approx(used))
