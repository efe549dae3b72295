"""What is left of the running step, and which progress keeps it from being stopped."""

import math

import msgspec
import pytest
from governors import LONG, NOTHING_REACHED, URGENT, governor, job, view
from published import Account, running, suspended

from prefill_node.board.messages import Reached
from prefill_node.replica.governing.ledger import Accepted
from slo.monitor.directives import DirectiveReason, PreemptDirective
from slo.preemption.types import Keep, KeepReason, Preempt
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS, PREMIUM, Tier


@pytest.mark.parametrize(
    ("from_boundary", "reached", "remaining_s"),
    [
        (0, NOTHING_REACHED, 1.0),
        (0, Reached(7, 0), 1.0),
        (0, Reached(7, 4), 0.6),
        (0, Reached(7, 9), 0.1),
        (0, Reached(6, 9), 1.0),
        (0, Reached(8, 9), 1.0),
        (3, Reached(6, 9), 0.7),
        (3, Reached(7, 4), 0.6),
        (3, Reached(7, 0), 1.0),
    ],
    ids=[
        "no step has begun",
        "at its first boundary",
        "in the middle",
        "at its last boundary",
        "the step before has reached more",
        "a later step has reached more",
        "resumed, not begun yet",
        "resumed, under way",
        "its checkpoint could not be used",
    ],
)
def test_what_is_left_of_a_step_is_what_lies_behind_its_boundary(from_boundary, reached, remaining_s):
    step = running("long", from_boundary=from_boundary)
    assert governor(LONG).remaining_s(step, reached) == pytest.approx(remaining_s)


@pytest.mark.parametrize(
    ("reached", "is_stopped"),
    [(Reached(7, 0), True), (Reached(7, 8), False), (Reached(6, 8), True)],
    ids=["at its start", "nearly done", "another step was nearly done"],
)
def test_a_step_that_is_nearly_done_is_not_stopped(reached, is_stopped):
    decision = governor(LONG, URGENT).decide(view(running("long")), reached, 0.0)
    assert isinstance(decision, Preempt) == is_stopped


def test_a_step_is_not_stopped_again_for_one_that_found_no_memory():
    deciding = governor(LONG, URGENT)
    published = msgspec.structs.replace(view(running("long"), urgent=Account()), none_can_start=True)
    assert isinstance(deciding.decide(published, NOTHING_REACHED, 0.0), Keep)
    why = DirectiveReason.TIER_AT_RISK
    directive = PreemptDirective(ReplicaId("p"), running("long").step_id, URGENT.job_id, why)
    assert deciding.direct(directive, published, NOTHING_REACHED, 0.0) == Keep(KeepReason.NOBODY_WAITS)
    later = msgspec.structs.replace(published, none_can_start=False)
    assert isinstance(deciding.decide(later, NOTHING_REACHED, 0.0), Preempt)


def test_a_step_is_stopped_for_one_that_found_no_memory_in_time_for_it_to_take_some():
    """A stop takes up to 0.1 s."""
    deciding = governor(LONG, URGENT)
    published = msgspec.structs.replace(view(running("long"), urgent=Account()), passed={"urgent": 0.3})
    assert deciding.decide(published, NOTHING_REACHED, 0.0).recheck_at_s == pytest.approx(0.2)
    never = msgspec.structs.replace(published, passed={"urgent": math.inf})
    assert deciding.decide(never, NOTHING_REACHED, 0.2) == Keep(KeepReason.NOBODY_WAITS)
    assert isinstance(deciding.decide(published, NOTHING_REACHED, 0.2), Preempt)


def test_while_nobody_else_could_start_a_step_is_stopped_only_for_who_comes_later():
    published = view(running("long"), suspended("other"), urgent=Account())
    published = msgspec.structs.replace(published, none_can_start=True)
    stopped = job("other", 1000, deadline_s=1.2, tier=PREMIUM)
    deciding = governor(LONG, URGENT, stopped)
    assert isinstance(deciding.decide(published, NOTHING_REACHED, 0.0), Keep)
    deciding.arrived(job("newcomer", 100, deadline_s=0.6, tier=PREMIUM), 0.0)
    decision = deciding.decide(published, NOTHING_REACHED, 0.0)
    assert isinstance(decision, Preempt)
    assert decision.beneficiary == "newcomer"


def test_a_request_of_a_tier_that_only_others_know_counts_for_the_least():
    deciding = governor(LONG)
    deciding.arrived(Accepted(JobId("other"), Tier("other"), 100, 0.5, 0.0), 0.0)
    (waiting,) = [each for each in deciding.waiting(view(running("long")), 0.0) if each.job_id == "other"]
    assert waiting.weight == min(DEFAULT_TIERS.weights.values())


def test_a_forward_pass_without_boundaries_makes_no_progress():
    assert governor(LONG, boundaries=0).progress(running("long"), Reached(7, 3)) == 0.0
