"""When a step that goes on is looked at again."""

import math

from governors import LONG, NOTHING_REACHED, governor, job, view
from published import running

from slo.preemption.types import Keep, KeepReason, Preempt, PreemptReason
from slo.request import JobId
from slo.tiers import PREMIUM


def test_a_waiter_with_time_to_spare_is_looked_at_again_before_it_is_too_late():
    patient = job("patient", 100, deadline_s=3.0, tier=PREMIUM)
    two = governor(LONG, patient)
    step = view(running("long"))
    decision = two.decide(step, NOTHING_REACHED, 0.0)
    assert isinstance(decision, Keep)
    assert decision.reason is KeepReason.WAITERS_IN_TIME
    assert 0.0 < decision.recheck_at_s < 3.0 - 0.1
    stuck = two.decide(step, NOTHING_REACHED, decision.recheck_at_s)
    assert stuck == Preempt(7, JobId("patient"), PreemptReason.RESCUE), "the step has made no progress"


def test_the_most_critical_of_several_waiters_sets_the_time():
    def recheck_at_s(*waiters):
        decision = governor(LONG, *waiters).decide(view(running("long")), NOTHING_REACHED, 0.0)
        assert isinstance(decision, Keep)
        return decision.recheck_at_s

    early, late = job("early", 100, deadline_s=3.0), job("late", 100, deadline_s=9.0)
    assert recheck_at_s(late, early) == recheck_at_s(early) < recheck_at_s(late) < math.inf


def test_nobody_with_a_deadline_needs_no_timer():
    decision = governor(LONG, job("background")).decide(view(running("long")), NOTHING_REACHED, 0.0)
    assert decision == Keep(KeepReason.WAITERS_IN_TIME, math.inf)
