"""Steps whose clients have all left are stopped."""

import pytest
from governors import NOTHING_REACHED, governor, job, view
from published import running

from prefill_node.replica.governing.governor import NOBODY
from slo.preemption.types import Keep, KeepReason, Preempt, PreemptReason
from slo.request import JobId


def abandon(governed, *names_):
    for name in names_:
        governed.ledger.ended(JobId(name), abandoned=True)


def test_a_step_is_stopped_when_all_its_clients_have_left_and_not_before():
    two = governor(job("a"), job("b"))
    abandon(two, "a")
    step = view(running("a", "b"))
    assert isinstance(two.decide(step, NOTHING_REACHED, 0.0), Keep)
    abandon(two, "b")
    assert two.decide(step, NOTHING_REACHED, 0.0) == Preempt(7, NOBODY, PreemptReason.ABANDONED)
    assert two.decide(step, NOTHING_REACHED, 0.0) == Keep(KeepReason.IDLE), "once"


def test_a_step_whose_answer_has_arrived_is_not_abandoned():
    one = governor(job("a"))
    one.ledger.ended(JobId("a"))
    assert isinstance(one.decide(view(running("a")), NOTHING_REACHED, 0.0), Keep)


@pytest.mark.parametrize("jobs", [("",), ("a", "")], ids=["a measurement", "with a measurement"])
def test_work_of_no_job_is_not_abandoned(jobs):
    one = governor(job("a"))
    abandon(one, "a")
    assert isinstance(one.decide(view(running(*jobs)), NOTHING_REACHED, 0.0), Keep)


def test_an_abandoned_step_is_stopped_whatever_the_limits():
    one = governor(job("a"), max_preemptions=0, max_suspended_steps=0, max_suspended_bytes=0)
    abandon(one, "a")
    decision = one.decide(view(running("a")), NOTHING_REACHED, 0.0)
    assert decision == Preempt(7, NOBODY, PreemptReason.ABANDONED)
