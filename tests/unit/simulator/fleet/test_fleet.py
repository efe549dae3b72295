"""A whole fleet in virtual time, with the router's core and the replicas' own rules."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_fleet import DECODE, HARDWARE, NOBODY_IS_SHED, check_at_rest, ends, fleet, stream

from simulator.arms.arms import ARMS
from simulator.cost.decode_steps import UNLIMITED, DecodeModel
from simulator.cost.operators import LLAMA_3_8B
from simulator.fleet.fleet import TOO_LONG, simulate
from simulator.fleet.setup import NO_DELAYS, FleetSetup
from simulator.study.run import run
from simulator.workload.arrivals import Arrival
from slo.outcomes import Outcome
from slo.predict.handoff import INSTANT_LINK, Link
from slo.tiers import PREMIUM, STANDARD


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("load", [0.8, 2.5])
def test_every_request_ends_once_and_nothing_is_held_at_rest(arm, load):
    arrivals = stream(load * 2)
    result = simulate(fleet(arm), arrivals)
    assert [p.arrival for p in result.passages] == arrivals
    check_at_rest(result)


def test_the_same_arguments_give_the_same_result():
    setup = fleet(placement="power_of_two_choices", seed=4)
    assert ends(simulate(setup, stream(1.9))) == ends(simulate(setup, stream(1.9)))


@pytest.mark.parametrize("arm", ARMS)
def test_one_replica_with_nothing_around_it_does_what_it_does_alone(arm):
    arrivals = [a for a in stream(1.0, 400) if a.ttft_s is not None]
    last = replace(arrivals[-1], number=10_000, ttft_s=600.0)  # so that the run ends after everybody
    arrivals.append(last)
    alone = run(ARMS[arm], HARDWARE, arrivals, ARMS[arm].settings[0])
    setup = FleetSetup(
        ARMS[arm],
        HARDWARE,
        1,
        link=INSTANT_LINK,
        tiers=NOBODY_IS_SHED,
        delays=NO_DELAYS,
        handoff_s=0.0,
    )
    result = simulate(setup, arrivals)
    assert [job.first_token_s for job in result.jobs] == [job.first_token_s for job in alone.jobs]
    assert [job.preemptions for job in result.jobs] == [job.preemptions for job in alone.jobs]
    assert result.prefill[0].busy_s == alone.replica.busy_s


@pytest.mark.long
@pytest.mark.parametrize("arm", ["slackserve", "fcfs"])
def test_more_replicas_are_never_much_worse(arm):
    arrivals = stream(2.4, 800)
    shares = [simulate(fleet(arm, replicas), arrivals).attainment for replicas in (1, 2, 3, 4, 6)]
    for fewer, more in pairwise(shares):
        assert more > fewer - 0.02
    assert shares[-1] > 0.97


def test_the_router_places_better_than_taking_turns():
    arrivals = stream(2.7, 1000)
    shares = {
        placement: simulate(fleet(replicas=3, placement=placement), arrivals).attainment
        for placement in ("least_harm", "round_robin")
    }
    assert shares["least_harm"] > shares["round_robin"]


def test_taking_turns_takes_turns():
    setup = fleet("fcfs", 3, placement="round_robin")
    counts = Counter(p.prefill_replica for p in simulate(setup, stream(1.0, 300)).passages)
    assert [*counts.values()] == [100, 100, 100]


def test_replicas_that_do_not_report_get_every_request():
    result = simulate(fleet("fcfs", 1), stream(3.0))
    assert result.refused == 0.0
    assert result.attainment < 0.5


def test_what_cannot_be_in_time_is_refused_and_counts_as_missed():
    arrivals = [
        Arrival(0, 0.0, "urgent", 20_000, 10, 0.2, STANDARD),
        Arrival(1, 0.1, "urgent", 20_000, 10, 0.2, PREMIUM),
    ]
    result = simulate(fleet(), arrivals)
    assert result.jobs[0].refused == "deadline_infeasible"
    assert [p.outcome for p in result.passages] == [Outcome.SHED, Outcome.FINISHED]
    assert result.attainment == 0.0
    check_at_rest(result)


def test_what_no_memory_could_hold_is_refused():
    arrivals = [
        Arrival(0, 0.0, "long", HARDWARE.kv_tokens + 1, 10, None, STANDARD),
        Arrival(1, 0.0, "fits", 100, 10, None, STANDARD),
    ]
    result = simulate(fleet(), arrivals)
    assert result.jobs[0].refused == TOO_LONG
    assert result.outcomes == {Outcome.REJECTED: 1, Outcome.FINISHED: 1}
    check_at_rest(result)


def test_the_first_token_waits_for_no_transfer_and_the_others_do():
    arrivals = [Arrival(0, 1.0, "one", 1000, 5, None, STANDARD)]
    link, model = Link(1e9, 0.01), DecodeModel(0.02, 0.0, 0.0, 0.0, UNLIMITED)
    setup = fleet(link=link, decode=model, decode_replicas=1, handoff_s=0.003)
    passage = simulate(setup, arrivals).passages[0]
    transfer_s = link.alone_s(1000 * LLAMA_3_8B.kv_bytes_per_token)
    way_s = setup.delays.wire_s + setup.delays.render_s
    prefill_s = HARDWARE.cost.prefill_s(1000)
    assert passage.job.ttft_s == pytest.approx(way_s + prefill_s + 0.003)
    assert passage.tpot_s == pytest.approx((transfer_s + 4 * 0.02 - 0.003) / 4)


def test_an_answer_of_one_token_needs_no_transfer():
    arrivals = [Arrival(n, 1.0 + n, "one", 1000, 1, None, STANDARD) for n in range(2)]
    result = simulate(fleet(link=Link(1e3, 0.01), decode_replicas=1), arrivals)
    assert result.jobs[0].ttft_s < 1.0
    assert result.outcomes == {Outcome.FINISHED: 2}
    assert result.passages[0].tpot_s is None
    check_at_rest(result)


def test_prefill_holds_kv_until_it_has_been_pulled():
    """With a slow link, memory of the prefill replica is what bounds the throughput."""
    hardware = replace(HARDWARE, kv_tokens=3008)
    arrivals = [Arrival(n, 0.0, "one", 2000, 2, None, STANDARD) for n in range(4)]
    link = Link(2000 * LLAMA_3_8B.kv_bytes_per_token / 10.0, 0.0)
    setup = replace(fleet(replicas=1, link=link, handoff_s=0.0), hardware=hardware)
    result = simulate(setup, arrivals)
    starts = sorted(job.prefilled_s for job in result.jobs)
    assert all(later - earlier > 10.0 for earlier, later in pairwise(starts))
    check_at_rest(result)


def test_a_small_decode_tier_makes_prefill_wait():
    arrivals = stream(1.5)
    small = replace(DECODE, kv_tokens=16_000)
    slow = simulate(fleet(decode=small, decode_replicas=1), arrivals)
    fast = simulate(fleet(), arrivals)
    assert slow.waited_for_memory > 0.1 > fast.waited_for_memory
    assert slow.attainment < fast.attainment
    check_at_rest(slow)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(["slackserve", "sedf", "fcfs"]),
)
def test_any_small_fleet_comes_to_rest(seed, replicas, decode_replicas, arm):
    setup = fleet(arm, replicas, decode_replicas=decode_replicas, decode=replace(DECODE, kv_tokens=70_000))
    check_at_rest(simulate(setup, stream(2.0, 60, seed)))
