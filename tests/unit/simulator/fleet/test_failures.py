"""Prefill replicas that die in a simulated fleet, and others that take their place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_fleet import HARDWARE, check_at_rest, ends, fleet, stream

from simulator.fleet.fleet import simulate
from simulator.fleet.scaling import Elasticity
from simulator.fleet.setup import Failure
from simulator.workload.arrivals import Arrival
from slo.admission.rules import AdmissionRules
from slo.outcomes import Outcome
from slo.tiers import BACKGROUND, PREMIUM, STANDARD


@pytest.mark.parametrize("arm", ["slackserve", "sedf-recompute", "fcfs"])
def test_a_death_loses_nobody(arm):
    arrivals = stream(1.6, 500)
    died_s = arrivals[200].at_s
    result = simulate(fleet(arm), arrivals, [Failure(0, died_s, died_s + 15.0)])
    check_at_rest_but_for_the_dead(result)
    again = [p for p in result.passages if p.placements > 1]
    assert again
    assert all(p.job.first_token_s > died_s + 5.0 for p in again if p.outcome is Outcome.FINISHED)
    assert len(result.prefill) == 3
    assert result.prefill[2].busy_s > 0, "the replica that came back serves"


def test_a_death_is_deterministic():
    arrivals = stream(1.6, 300)
    failures = [Failure(1, 10.0, 20.0)]
    assert ends(simulate(fleet(), arrivals, failures)) == ends(simulate(fleet(), arrivals, failures))


def test_a_request_is_placed_again_when_the_death_is_noticed():
    arrivals = [Arrival(0, 1.0, "one", 6000, 5, None, BACKGROUND)]
    prefill_s = HARDWARE.cost.prefill_s(6000)
    result = simulate(fleet(replicas=2), arrivals, [Failure(0, 1.0 + prefill_s / 2, 100.0)])
    (passage,) = result.passages
    assert passage.placements == 2
    assert passage.prefill_replica == "prefill-1.1"
    noticed_s = 1.0 + prefill_s / 2 + 5.0
    assert passage.job.prefilled_s == pytest.approx(noticed_s + prefill_s, abs=0.01)


def test_nothing_is_refused_because_of_a_death_without_deadlines():
    arrivals = [Arrival(n, n * 0.5, "one", 2000, 20, None, BACKGROUND) for n in range(60)]
    result = simulate(fleet(replicas=2), arrivals, [Failure(0, 3.2, 9.0), Failure(1, 12.2, 40.0)])
    assert result.outcomes == {Outcome.FINISHED: 60}


def test_without_any_replica_requests_are_refused():
    arrivals = [Arrival(n, n * 1.0, "one", 2000, 20, 2.0, PREMIUM) for n in range(20)]
    result = simulate(fleet(replicas=1), arrivals, [Failure(0, 4.5, 15.5)])
    assert [job.refused for job in result.jobs].count("no_replica") == 11
    check_at_rest_but_for_the_dead(result)


def test_one_that_finds_no_replica_after_a_death_is_no_work_any_more():
    arrivals = [Arrival(n, n * 0.1, "one", 4000, 20, 60.0, PREMIUM) for n in range(3)]
    arrivals.append(Arrival(3, 60.0, "one", 100, 20, None, BACKGROUND))
    backlogs = {}

    def sizer(seen, now_s):
        backlogs[round(now_s)] = seen.backlog_s
        return 1

    scaled = Elasticity(sizer, start_s=40.0)
    setup = fleet(replicas=1, admission=AdmissionRules())
    result = simulate(setup, arrivals, [Failure(0, 0.3, 50.0)], elasticity=scaled)
    assert [job.refused for job in result.jobs].count("no_replica") == 3
    assert backlogs[2] > 0.0
    assert backlogs[10] == 0.0


def test_kv_on_its_way_is_lost_with_its_source():
    slow = fleet(replicas=2)
    arrivals = [Arrival(0, 0.0, "one", 4000, 5, None, BACKGROUND)]
    prefilled_s = simulate(slow, arrivals).jobs[0].prefilled_s
    result = simulate(slow, arrivals, [Failure(0, prefilled_s + 0.001, 50.0)])
    assert result.passages[0].placements == 2
    later = simulate(slow, arrivals, [Failure(0, prefilled_s + 1.0, 50.0)])
    assert later.passages[0].placements == 1


@pytest.mark.parametrize(("wanted", "paid_until_s"), [(2, 100.0), (1, 60.0)])
def test_a_replica_is_paid_for_while_it_lives_and_one_that_has_come_back_can_be_drained(wanted, paid_until_s):
    arrivals = [Arrival(n, n * 1.0, "one", 2000, 20, None, BACKGROUND) for n in range(100)]

    def sizer(seen, now_s):
        return min(seen.running, 2 if now_s < 60.0 else wanted)

    result = simulate(
        fleet(replicas=2), arrivals, [Failure(1, 20.5, 30.5)], elasticity=Elasticity(sizer, start_s=20.0)
    )
    assert result.outcomes == {Outcome.FINISHED: 100}
    assert result.sizes[-1][1] == wanted
    assert result.replica_s == pytest.approx(100.0 + paid_until_s - 10.0, abs=5.0)


def test_a_failure_ends_after_it_began():
    with pytest.raises(ValueError, match="back after that"):
        Failure(0, 5.0, 5.0)


def test_only_a_replica_that_is_there_can_die():
    with pytest.raises(ValueError, match="0 is the first of 2"):
        simulate(fleet(replicas=2), stream(1.0, 5), [Failure(2, 1.0, 2.0)])


def test_a_request_that_is_late_already_is_not_placed_again_if_it_may_be_shed():
    arrivals = [Arrival(0, 0.0, "one", 8000, 5, 2.0, STANDARD)]
    result = simulate(fleet(replicas=2), arrivals, [Failure(0, 0.3, 50.0)])
    assert result.jobs[0].refused == "deadline_infeasible"
    assert result.passages[0].placements == 1


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(0, 1), st.floats(0, 12), st.floats(0.1, 12)), max_size=5),
    st.sampled_from(["slackserve", "fcfs"]),
)
def test_whatever_dies_every_request_ends_once(seed, deaths, arm):
    failures = [Failure(replica, at_s, at_s + for_s) for replica, at_s, for_s in deaths]
    result = simulate(fleet(arm), stream(2.0, 120, seed), failures)
    check_at_rest_but_for_the_dead(result)


def check_at_rest_but_for_the_dead(result):
    resting = [r for r in result.prefill if not hasattr(r, "engine") or not r.engine.requests]
    assert len(resting) >= result.prefill_places
    check_at_rest(result, resting)
