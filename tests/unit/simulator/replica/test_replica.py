"""One replica in virtual time."""

from dataclasses import replace

import pytest

from simulator.arms.arms import ARMS
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND

HARDWARE = PRESETS["flowprefill-8b"].hardware


def test_one_that_is_placed_again_counts_as_arriving_when_it_gets_here():
    """Filed at the time when it came to the fleet, it would be taken for an overload."""
    loop = EventLoop()
    replica = ARMS["slackserve"].build(loop, HARDWARE, {}, lambda _: None)
    came_s = [*map(float, range(200))]
    for number, at_s in enumerate([*came_s, 80.0]):
        job = Job(Arrival(number, at_s, "kind", 2000, 1, None, BACKGROUND), 1.0, float("inf"))
        loop.call_at(max(at_s, float(number)), replica.arrive, job)
    loop.run(200.0)
    load = replica.governor.ledger.predictor.work_s(2000, 0)
    assert replica.governor.forecast.at(200.0).load == pytest.approx(load, rel=0.05)
    assert replica.engine._stepper.rules.forecast.at(200.0).load == pytest.approx(load, rel=0.05)


@pytest.mark.parametrize(("most", "sizes"), [(1, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), (float("inf"), [5])])
def test_its_steps_have_no_more_members_than_its_rules_allow(most, sizes):
    engine = ARMS["slackserve"].build(EventLoop(), HARDWARE, {}, lambda _: None).engine
    engine._stepper.rules = replace(engine._stepper.rules, most_members=most)
    for number in range(5):
        engine.add(Job(Arrival(number, 0.0, "kind", 20, 1, None, BACKGROUND), 1.0, float("inf")), 0.0)
    found, now_s = [], 0.0
    while (issued := engine.issue(now_s)) is not None:
        found.append(len(issued.members))
        now_s = issued.ends_s
        engine.complete(now_s)
    assert found == sizes
