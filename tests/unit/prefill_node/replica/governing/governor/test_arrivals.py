"""What has arrived is expected to arrive again."""

import pytest
from governors import LONG, NOTHING_REACHED, URGENT, governor, job, names, view
from published import running

from slo.preemption.types import Preempt
from slo.queue.order import QueueOrder
from slo.request import JobId
from slo.tiers import PREMIUM


def test_what_arrives_is_noted_and_expected_again():
    """What was there before, as warm-up is, and what is noted twice by mistake of nobody, is not."""
    one = governor(LONG)
    assert one.forecast.at(0.0).load == 0.0
    for n in range(100):
        one.arrived(job(f"job-{n}", 500, deadline_s=n + 1.0, arrived_s=float(n)), float(n))
    assert len(one.ledger.accepted) == 101
    assert one.forecast.at(99.0).load == pytest.approx(0.5, rel=0.05)


def test_one_that_has_waited_for_a_place_arrives_when_it_gets_it():
    """Filed at the time when it came, it would make what has come since count as if it came at once."""
    one = governor(LONG)
    for n in range(200):
        one.arrived(job(f"job-{n}", 300, arrived_s=float(n)), float(n))
    one.arrived(job("has-waited", 300, arrived_s=80.0), 200.0)
    assert one.forecast.at(200.0).load == pytest.approx(0.3, rel=0.05)
    assert one.forecast.at(200.0).pressure == 0.0
    assert one.ledger.accepted["has-waited"].arrived_s == 80.0


def test_the_forecast_orders_the_queue_and_decides():
    """`long` is worth little for each second; under overload its time is kept for what will come."""
    two = governor(job("long", 1000, deadline_s=10.0), URGENT, order=QueueOrder.FEASIBLE_SET)
    step = view(running("other", tokens=200))
    assert isinstance(two.decide(view(running("long")), NOTHING_REACHED, 0.0), Preempt)
    assert names(two.waiting(step, 0.0)) == ["urgent", "long"]
    waiters = [job("near", 1200, deadline_s=1.9), job("far", 100, deadline_s=2.0, tier=PREMIUM)]
    calm, crowded = (governor(*waiters, order=QueueOrder.FEASIBLE_SET) for _ in range(2))
    for n in range(600):
        crowded.forecast.arrived(0.2, 4.0, n / 10)
    assert names(calm.waiting(view(), 0.0)) == ["near", "far"]
    assert names(crowded.waiting(view(), 0.0)) == ["far", "near"]


def test_time_is_not_kept_for_those_who_come_no_more():
    one = governor(order=QueueOrder.FEASIBLE_SET)
    for n in range(600):
        one.arrived(job(f"past-{n}", 200, deadline_s=n / 10 + 1, arrived_s=n / 10, tier=PREMIUM), n / 10)
        one.ledger.ended(JobId(f"past-{n}"), abandoned=False)
    one.arrived(job("long", 8000, deadline_s=160.0, arrived_s=60.0), 60.0)
    for n in range(30):
        one.arrived(job(f"later-{n}", 500, deadline_s=210.0, arrived_s=60.0, tier=PREMIUM), 60.0)
    assert names(one.waiting(view(), 60.0))[0] != "long", "others are worth more per second"
    assert names(one.waiting(view(), 151.0))[0] == "long", "nobody has come for a minute and a half"
