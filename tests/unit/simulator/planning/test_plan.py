"""How many replicas a load needs."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_fleet import DECODE, MIX, fleet

from simulator.cost.decode_steps import INSTANT_DECODE, DecodeModel
from simulator.fleet.fleet import simulate
from simulator.fleet.setup import FleetSetup
from simulator.planning.decode_plan import ALONE, decodes, max_replicas, min_decode_replicas, min_replicas
from simulator.planning.plan import Outage, PlannedLoad, plan
from simulator.report.plots import capacity_plot
from simulator.workload.arrivals import Kind, LengthClass, Mix, Trace
from slo.predict.handoff import INSTANT_LINK
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM


@given(st.integers(1, 300), st.floats(0.1, 40))
def test_the_search_finds_the_smallest_number_that_is_enough(needed, load):
    tried = []

    def is_enough(count):
        tried.append(count)
        return count >= needed

    found = min_replicas(is_enough, load)
    within_reach = needed <= max_replicas(load)
    assert found == needed if within_reach or found is not None else needed > max_replicas(load)
    assert len(tried) <= 4 + 2 * math.log2(max(tried))
    assert min(tried) >= 1


def test_a_plan_reaches_the_target_with_the_fewest_that_do():
    demand = PlannedLoad(MIX, 14.0, 500, seed=2, target=0.95)
    tried = []
    found = plan(fleet(), demand, tried.append)
    assert found.chosen == found.best.replicas
    assert found.best.reaches(0.95)
    assert all(not point.reaches(0.95) for point in found.points if point.replicas < found.chosen)
    assert [point.replicas for point in found.points] == sorted(tried)
    assert min(found.tpot_by_tier.values()) >= 0.95
    assert found.chosen >= math.floor(found.load * 0.95)
    assert 0.3 < found.best.utilisation < 1.0


def test_a_plan_bears_the_loss_of_a_replica():
    demand = PlannedLoad(MIX, 14.0, 500, seed=2, target=0.95)
    usual = plan(fleet(), demand)
    outage = Outage(replicas=1, at_s=5.0, for_s=20.0)
    found = plan(fleet(), replace(demand, outage=outage))
    assert found.chosen > usual.chosen
    without = next(point for point in usual.points if point.replicas == usual.chosen)
    with_loss = next(point for point in found.points if point.replicas == usual.chosen)
    assert with_loss.attainment < without.attainment
    assert found.document()["outage"] == {"replicas": 1, "at_s": 5.0, "for_s": 20.0}


def test_decode_replicas_are_planned_without_the_loss():
    """What waits for prefill meanwhile comes to decode faster afterwards, for a few seconds."""
    mix = Mix({"only": Kind(1.0, 2000, 30.0, BACKGROUND, range_tokens=(2000, 2000), output_tokens=60)})
    setup = fleet(decode=replace(DECODE, kv_tokens=30_000))
    demand = PlannedLoad(mix, 1.7 / setup.hardware.cost.prefill_s(2000), 200, target=0.9)
    usual = plan(setup, demand)
    found = plan(setup, replace(demand, outage=Outage(replicas=1, at_s=5.0, for_s=10.0)))
    assert (found.chosen, found.decode_replicas) == (usual.chosen, usual.decode_replicas) == (2, 1)


def test_who_loses_all_replicas_serves_nobody_meanwhile():
    assert [failure.replica for failure in Outage(3, 1.0, 2.0).failures(2)] == [0, 1]


def test_a_plan_is_a_document_and_a_plot():
    found = plan(fleet("fcfs", setting={"join_tokens": 2048.0}), PlannedLoad(MIX, 4.0, 150, target=0.5))
    document = json.loads(json.dumps(found.document()))
    assert document["chosen"] == found.chosen
    assert document["points"][0]["by_tier"].keys() == {"premium", "standard", "background"}
    assert capacity_plot(found.capacity_points, found.target, found.chosen).name == "capacity"


def test_without_slack_the_plan_is_the_arithmetic_one():
    """One kind, no objective but to be served: any number of replicas will do, so one is chosen."""
    mix = Mix({"batch": Kind(1.0, 2000, None, BACKGROUND)})
    assert plan(fleet(), PlannedLoad(mix, 5.0, 100)).chosen == 1


def test_a_load_needs_at_least_as_many_replicas_as_its_work():
    mix = Mix({"only": Kind(1.0, 2000, 3.0, PREMIUM, range_tokens=(2000, 2000), output_tokens=10)})
    setup = FleetSetup(fleet().arm, fleet().hardware, 1, decode=INSTANT_DECODE, link=INSTANT_LINK)
    rate_rps = 2.5 / setup.hardware.cost.prefill_s(2000)
    found = plan(setup, PlannedLoad(mix, rate_rps, 1500, target=0.9))
    assert found.load == pytest.approx(2.5)
    assert found.chosen == 3


@pytest.mark.parametrize("arm", ["slackserve", "fcfs"])
@pytest.mark.parametrize("ttft_s", [600.0, None])
def test_a_plan_keeps_up_however_long_its_objectives_are_beside_the_stream(arm, ttft_s):
    """Within twenty seconds nobody is late who may take ten, by however little prefill."""
    mix = Mix({"batch": Kind(1.0, 12000, ttft_s, BACKGROUND, sigma=0.3, output_tokens=4)})
    found = plan(fleet(arm), PlannedLoad(mix, 4.0, 80))
    assert found.chosen >= found.load > 4.0
    behind = [point for point in found.points if point.replicas < found.chosen]
    assert behind
    assert not any(point.keeps_up for point in behind)
    assert found.best.keeps_up


def test_what_a_plan_keeps_up_with_is_the_work_that_is_done():
    """Prompts that share nearly all of their tokens take a fraction of what they would take alone."""
    records = [(float(number), 8192, 4, (*range(15), 100 + number)) for number in range(100)]
    hour = LengthClass(math.inf, "file", 3600.0, BACKGROUND)
    trace = Trace(records, [hour], fleet().hardware.cost.prefill_s)
    found = plan(fleet(), PlannedLoad(trace, 4.0, 100))
    assert found.chosen < found.load


def test_an_objective_below_the_prefill_time_is_out_of_reach():
    mix = Mix({"only": Kind(1.0, 8000, 0.05, PREMIUM)})
    found = plan(fleet(), PlannedLoad(mix, 1.0, 60))
    assert found.chosen is None
    assert found.best is found.points[-1]


def test_decode_replicas_keep_the_pace():
    slow = DecodeModel(0.004, 0.002, 1e-8, 0.001, kv_tokens=1 << 30)
    mix = Mix({"only": Kind(1.0, 500, None, PREMIUM, output_tokens=100)})
    found = plan(fleet(decode=slow), PlannedLoad(mix, 8.0, 300))
    assert DEFAULT_TIERS[PREMIUM].tpot_s == 0.03
    # 14 requests in a batch keep 30 ms; 800 tokens a second need two such batches
    assert found.decode_replicas in {2, 3}
    never = plan(
        fleet(decode=DecodeModel(0.05, 0.0, 0.0, 0.0, kv_tokens=1 << 30)), PlannedLoad(mix, 8.0, 100)
    )
    assert never.decode_replicas is None


@pytest.mark.parametrize(
    ("kv_tokens", "tier", "rate_rps", "requests"),
    [(200_000, BACKGROUND, 4.0, 240), (None, PREMIUM, 3.0, 120)],
)
def test_decode_replicas_are_enough_although_answers_take_longer_than_the_stream(
    kv_tokens, tier, rate_rps, requests
):
    """The first answers all find room, and read little: what is planned from a minute also bears six."""
    mix = Mix({"only": Kind(1.0, 700, None, tier, output_tokens=3000)})
    setup = fleet(decode=DECODE if kv_tokens is None else replace(DECODE, kv_tokens=kv_tokens))
    planned = min_decode_replicas(setup, mix.stream(rate_rps, requests, 1), rate_rps, 0.95)
    alone = replace(setup, arm=ALONE, setting={}, placement="round_robin")
    later = mix.stream(rate_rps, 6 * requests, 1)
    assert decodes(simulate(replace(alone, decode_replicas=planned), later), setup, 0.95)
    assert not decodes(simulate(replace(alone, decode_replicas=planned - 2), later), setup, 0.95)


def test_decode_replicas_have_room():
    small = DecodeModel(
        DECODE.weights_s, DECODE.request_s, DECODE.kv_token_s, DECODE.fixed_s, kv_tokens=20_000
    )
    mix = Mix({"only": Kind(1.0, 4000, None, PREMIUM, output_tokens=200, range_tokens=(4000, 4000))})
    found = plan(fleet(decode=small), PlannedLoad(mix, 4.0, 200))
    assert found.decode_replicas >= 2, "each holds four requests"
