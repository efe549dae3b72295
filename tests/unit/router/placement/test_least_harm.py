"""The prediction of one replica, the same on all at once, and the choice that rests on it."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.fleet.prefill_replica import PlacedJob, PrefillView
from router.fleet.queue_forecast import plan, prospect
from router.messages import PlacementReason
from router.placement.fleet_table import FleetTable
from router.placement.least_harm import LeastHarm
from router.placement.policies import (
    LeastOutstandingTokens,
    NewPrefill,
    PowerOfTwoChoices,
    PrefixAffinity,
    queued,
)
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.feasible_set import feasible_set, value
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
WAITING = st.tuples(
    st.integers(1, 3000),
    st.one_of(st.floats(0.05, 12.0), st.just(NO_DEADLINE)),
    st.sampled_from(DEFAULT_TIERS.names),
)


def replica(*jobs, name="prefill-0", running=None, preemptible_in_s=None):
    """A replica with these (tokens, due, tier); the one at `running` has just begun."""
    known = PrefillView(ReplicaId(name), LINE, 0.0, DEFAULT_TIERS.weights)
    placed = [PlacedJob(JobId(f"{n}"), tier, tokens, due, 0.0) for n, (tokens, due, tier) in enumerate(jobs)]
    known.preemptible_in_s = preemptible_in_s
    known.replace(placed, None if running is None else JobId(str(running)), 0.0)
    return known


def prefill(tokens, due_s, weight=2.0, **cached):
    return NewPrefill(tokens, due_s, weight, {ReplicaId(name): tokens for name, tokens in cached.items()})


replicas_of_any_kind = st.builds(
    lambda jobs, runs, yields: replica(*jobs, running=0 if runs and jobs else None, preemptible_in_s=yields),
    st.lists(WAITING, max_size=7),
    st.booleans(),
    st.one_of(st.none(), st.floats(0.0, 0.3)),
)


@given(replicas_of_any_kind, st.integers(1, 2000), st.floats(0.05, 12.0), st.floats(0.0, 3.0))
def test_free_means_that_everybody_on_time_remains_so(known, tokens, due_s, now_s):
    """And where nobody is given up, it means nothing else."""
    new = prefill(tokens, due_s)
    rows = FleetTable()
    rows.update([known], now_s)
    trial = rows.trial(new, now_s)
    work = known.outstanding(now_s)
    before = plan(work)
    found = prospect(work, queued(new, tokens * 0.001, now_s), before.value)
    on_time = feasible_set(work.waiting, work.free_at_s)
    if trial.is_free[0]:
        assert trial.end_s[0] <= due_s + 1e-9
        assert found.gain >= 2.0 - 1e-9 or on_time.tardy or not before.waits_for_end
    elif not on_time.tardy and not on_time.rest:
        assert found.gain < 2.0 - 1e-9 or not found.is_on_time


@given(st.lists(replicas_of_any_kind, min_size=1, max_size=6), st.integers(1, 2000), st.floats(0.05, 12.0))
def test_no_other_placement_is_predicted_to_have_more_on_time(fleet, tokens, due_s):
    new = prefill(tokens, due_s)
    choice = LeastHarm().choose(new, fleet, 0.0)

    def gain(known):
        work = known.outstanding(0.0)
        return prospect(work, queued(new, tokens * 0.001, 0.0), plan(work).value).gain

    assume(all(not feasible_set(known.outstanding(0.0).waiting, 0.0).tardy for known in fleet))
    assert gain(choice.replica) >= max(map(gain, fleet)) - 1e-9


@given(st.lists(WAITING, max_size=8))
def test_the_plan_keeps_what_the_replica_would_keep(jobs):
    work = replica(*jobs).outstanding(0.0)
    kept = feasible_set(work.waiting, 0.0).feasible
    laid = plan(work)
    assert laid.value == pytest.approx(sum(map(value, kept)))
    assert laid.deadlines_s == [one.deadline_s for one in kept]


def test_rows_follow_the_work():
    """A row laid out anew equals one laid out once; more work than there are places makes room."""
    rng = random.Random(3)
    fleet = [replica(name=f"prefill-{n}") for n in range(3)]
    rows, number = FleetTable(), 0
    for _ in range(120):
        known = rng.choice(fleet)
        if known.jobs and rng.random() < 0.35:
            known.remove(rng.choice(list(known.jobs)))
        else:
            number += 1
            due = rng.uniform(1, 60)
            known.add(PlacedJob(JobId(f"n{number}"), STANDARD, rng.randint(1, 500), due, 0.0))
        new = prefill(rng.randint(1, 500), rng.uniform(0.1, 60))
        rows.update(fleet, 0.0)
        fresh = FleetTable()
        fresh.update(fleet, 0.0)
        ours, theirs = rows.trial(new, 0.0), fresh.trial(new, 0.0)
        for name in ("own_s", "is_free", "end_s", "shortfall_s", "backlog_s"):
            assert list(getattr(ours, name)) == list(getattr(theirs, name))
    assert max(len(known.jobs) for known in fleet) > 8


def test_the_running_pass_is_stopped_for_whom_it_would_make_late():
    busy = replica((10_000, NO_DEADLINE, BACKGROUND), running=0, preemptible_in_s=0.1)
    choice = LeastHarm().choose(prefill(100, 0.5), [busy], 0.0)
    assert (choice.start_s, choice.end_s) == pytest.approx((0.1, 0.2))


def test_a_pass_that_would_be_late_for_it_is_stopped_only_for_more_worth():
    tight = replica((1000, 1.05, STANDARD), running=0, preemptible_in_s=0.0)
    assert LeastHarm().choose(prefill(300, 0.5, weight=1.0), [tight], 0.0).end_s > 0.5
    assert LeastHarm().choose(prefill(300, 0.5, weight=4.0), [tight], 0.0).end_s <= 0.5


def test_when_somebody_must_give_way_the_least_worth_does():
    premium = replica((1000, 1.05, PREMIUM), name="premium")
    standard = replica((1000, 1.05, STANDARD), name="standard")
    choice = LeastHarm().choose(prefill(300, 1.0, weight=4.0), [premium, standard], 0.0)
    assert choice.replica is standard
    assert choice.end_s <= 1.0
    assert choice.reason is PlacementReason.LEAST_HARM


def test_what_is_late_everywhere_goes_where_there_is_least_to_do():
    fleet = [replica((tokens, 99.0, PREMIUM), name=f"prefill-{tokens}") for tokens in (900, 500, 700)]
    choice = LeastHarm().choose(prefill(300, 0.2), fleet, 0.0)
    assert choice.replica is fleet[1]
    assert choice.end_s == pytest.approx(0.8)


@given(replicas_of_any_kind, st.integers(1, 2000), st.floats(0.01, 0.9))
def test_the_end_of_one_that_is_late_is_that_of_the_full_prediction(known, tokens, part):
    new = prefill(tokens, part * tokens * 0.001)
    choice = LeastHarm().choose(new, [known], 0.0)
    work = known.outstanding(0.0)
    found = prospect(work, queued(new, tokens * 0.001, 0.0), plan(work).value)
    assert choice.end_s > new.deadline_s
    assert not found.is_on_time
    assert (choice.start_s, choice.end_s) == pytest.approx((found.start_s, found.end_s))


def test_of_two_where_it_is_late_it_goes_before_work_without_a_deadline():
    due = replica((900, 99.0, STANDARD), name="due")
    undue = replica(*[(1000, NO_DEADLINE, BACKGROUND)] * 5, (300, 99.0, STANDARD), name="undue")
    choice = LeastHarm().choose(prefill(400, 0.2), [due, undue], 0.0)
    assert choice.replica is undue
    assert choice.end_s == pytest.approx(0.7)


def test_without_a_deadline_it_ends_behind_everybody():
    choice = LeastHarm().choose(prefill(300, NO_DEADLINE), [replica((900, NO_DEADLINE, PREMIUM))], 0.0)
    assert choice.end_s == pytest.approx(1.2)


def test_a_cached_prefix_is_less_work():
    fleet = [replica(name="cold"), replica((300, 5.0, STANDARD), name="warm")]
    assert LeastHarm().choose(prefill(1000, 4.0), fleet, 0.0).replica is fleet[0]
    choice = LeastHarm().choose(prefill(1000, 4.0, warm=800), fleet, 0.0)
    assert choice.replica is fleet[1]
    assert choice.end_s - choice.start_s == pytest.approx(0.2)


def test_prefix_affinity_takes_the_longest_prefix_then_the_fewest_tokens():
    fleet = [replica((tokens, 99.0, STANDARD), name=f"r{tokens}") for tokens in (900, 500, 700)]
    policy = PrefixAffinity()
    assert policy.choose(prefill(1000, 9.0), fleet, 0.0).replica is fleet[1]
    chosen = policy.choose(prefill(1000, 9.0, r900=512, r700=512), fleet, 0.0)
    assert chosen.replica is fleet[2]
    assert chosen.reason is PlacementReason.LONGEST_PREFIX


def test_power_of_two_choices_never_takes_the_busiest_and_leaves_nobody_out():
    fleet = [replica((tokens, 99.0, STANDARD), name=f"r{tokens}") for tokens in (900, 500, 700)]
    policy = PowerOfTwoChoices(random.Random(1).randrange)
    taken = [policy.choose(prefill(10, 9.0), fleet, 0.0).replica for _ in range(60)]
    assert fleet[0] not in taken
    assert {id(one) for one in taken} == {id(fleet[1]), id(fleet[2])}
    assert policy.choose(prefill(10, 9.0), fleet[:1], 0.0).replica is fleet[0]


def test_least_tokens_counts_what_is_outstanding():
    fleet = [replica((900, 99.0, STANDARD)), replica((500, math.inf, STANDARD))]
    assert LeastOutstandingTokens().choose(prefill(10, 9.0), fleet, 0.0).replica is fleet[1]
