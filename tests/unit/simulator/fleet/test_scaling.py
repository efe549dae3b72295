"""A fleet that grows and shrinks in virtual time: under a step, under waves, and drained."""

from itertools import pairwise

import pytest

from simulator.arms.arms import ARMS
from simulator.cost.decode_steps import INSTANT_DECODE
from simulator.fleet.fleet import simulate
from simulator.fleet.scaling import Elasticity, PrefillTierSeen
from simulator.fleet.setup import FleetSetup
from simulator.fleet.sizers import ByRequests, ByWork
from simulator.study.goodput import Experiment
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import varying
from slo.admission.rules import AdmissionRules
from slo.autoscaling.scaler import ScalingRules
from slo.outcomes import Outcome
from slo.predict.handoff import INSTANT_LINK

PRESET = PRESETS["flowprefill-8b"]
START_S = 20.0
RULES = ScalingRules(1, 6, start_s=START_S, keep_s=60.0)


@pytest.fixture(scope="module")
def capacity_rps():
    return Experiment(PRESET.hardware, PRESET.workload, 1, (1,)).capacity_rps()


def serve(load, seconds, capacity_rps, sizer, replicas=1, refuses=True):
    setup = FleetSetup(
        ARMS["slackserve"],
        PRESET.hardware,
        replicas,
        decode=INSTANT_DECODE,
        link=INSTANT_LINK,
        handoff_s=0.0,
        admission=AdmissionRules(),
    )
    peak = max(load(second) for second in range(seconds))
    arrivals = varying(
        PRESET.workload, lambda at_s: load(at_s) * capacity_rps, peak * capacity_rps, seconds, 1
    )
    fleet = setup if refuses else setup.taking_all()
    return simulate(fleet, arrivals, elasticity=Elasticity(sizer, START_S))


def test_under_a_step_it_grows_once_and_shrinks_once_and_loses_nothing(capacity_rps):
    def load(at_s):
        return 2.2 if 60 <= at_s < 240 else 0.4

    run = serve(load, 420, capacity_rps, ByWork(RULES))
    assert {passage.outcome for passage in run.passages} <= {Outcome.FINISHED, Outcome.SHED}
    assert all(passage.placements <= 1 for passage in run.passages), "nothing is placed again: it is drained"
    sizes = [size for _, size in run.sizes]
    assert max(sizes) in (3, 4), "2.2 replicas' work at 70 %, which is 3.1"
    assert sizes[-1] == 1
    turns = [b - a for a, b in pairwise(sizes)]
    changes_of_mind = sum((a > 0) != (b > 0) for a, b in pairwise(turns))
    assert changes_of_mind == 1, sizes
    late = [p for p in run.passages if 120 <= p.arrival.at_s < 240]
    assert sum(p.job.is_on_time for p in late) > 0.95 * len(late)


def test_what_is_paid_for_is_what_was_ordered(capacity_rps):
    run = serve(lambda _: 0.4, 100, capacity_rps, lambda seen, now_s: 2 if now_s > 50 else 1)
    ended_s = max(passage.job.prefilled_s for passage in run.passages if passage.job.is_finished())
    assert run.replica_s == pytest.approx(2 * ended_s - 50, abs=3)


def test_a_replica_that_is_not_wanted_before_it_is_up_never_serves(capacity_rps):
    run = serve(lambda _: 0.4, 100, capacity_rps, lambda seen, now_s: 3 if 30 < now_s < 35 else 1)
    assert len(run.prefill) == 1
    assert run.replica_s > 100


def test_what_is_refused_is_not_among_the_requests_that_rays_rule_counts(capacity_rps):
    def most_of(refuses):
        counted = []

        def sizer(seen, now_s):
            counted.append(seen.ongoing)
            return seen.target

        run = serve(lambda _: 2.0, 60, capacity_rps, sizer, refuses=refuses)
        return run.refused, max(counted)

    refused, behind_refusals = most_of(refuses=True)
    assert refused > 0.1
    refused, of_all = most_of(refuses=False)
    assert refused == 0
    assert of_all > 2 * behind_refusals


def seen(ongoing, target):
    return PrefillTierSeen(0.0, 0.0, ongoing, target, target, at_risk=False)


def test_rays_rule_waits_before_it_follows_the_requests():
    rule = ByRequests((1, 8), 2.0, upscale_delay_s=30, downscale_delay_s=60, look_back_s=1)
    targets, target = [], 1
    for now_s in range(200):
        target = rule(seen(8 if now_s < 100 else 1, target), float(now_s))
        targets.append(target)
    assert (targets[29], targets[30]) == (1, 4)
    assert (targets[155], targets[-1]) == (4, 1)


def test_a_stream_has_the_rate_that_it_is_asked_for(capacity_rps):
    arrivals = varying(PRESET.workload, lambda at_s: 5.0 if at_s < 100 else 20.0, 20.0, 200, 3)
    before = sum(arrival.at_s < 100 for arrival in arrivals)
    assert before == pytest.approx(500, rel=0.15)
    assert len(arrivals) - before == pytest.approx(2000, rel=0.1)
    assert [arrival.number for arrival in arrivals] == list(range(len(arrivals)))
