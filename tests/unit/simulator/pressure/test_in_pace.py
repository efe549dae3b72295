"""A decode engine in virtual time whose streams have TPOT objectives."""

from dataclasses import replace
from random import Random
from statistics import mean

import pytest

from simulator.cost.decode_steps import DecodeModel
from simulator.pressure.decoding import PressedRequest
from simulator.pressure.engine import PressedEngine, PressedSetup
from simulator.pressure.in_pace import InPace
from simulator.pressure.ours import Ours
from simulator.pressure.ways import ByPriority
from slo.tiers import DEFAULT_TIERS, PREMIUM, STANDARD, Tier

BACKGROUND = Tier("background")
MODEL = DecodeModel(weights_s=0.0, request_s=2e-4, kv_token_s=5e-8, fixed_s=0.005, kv_tokens=1 << 40)
SETUP = PressedSetup(MODEL, 1e-5, 1 << 20, moved_s=2e-5, noise=0.05)
TPOT_S = {PREMIUM: 0.010, STANDARD: 0.030, BACKGROUND: None}


def asked(rate, objectives=TPOT_S, seed=1, seconds=20):
    rng = Random(seed)
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        tier = rng.choice([*TPOT_S])
        answer = min(500, max(10, round(100 * rng.lognormvariate(0, 0.6))))
        tpot_s = objectives[tier]
        found.append(
            PressedRequest(f"r{len(found)}", tier, at_s, 200, answer, 500, tpot_s=tpot_s, has_first=True)
        )
    return found


def served(way, requests, setup=SETUP):
    engine = PressedEngine(setup, way, DEFAULT_TIERS)
    done = engine.run(requests)
    assert len(done) == len(requests)
    assert engine.free_blocks == setup.blocks
    return engine, {
        tier: sum(one.is_met for one in done if one.asked.tier == tier)
        / sum(one.asked.tier == tier for one in done)
        for tier in TPOT_S
    }


def test_streams_are_in_pace_that_are_not_with_everybody_in_each_step():
    requests = asked(17)
    free, without = served(Ours(DEFAULT_TIERS), requests)
    paced, met = served(InPace(DEFAULT_TIERS), requests)
    assert without[PREMIUM] < 0.8
    assert met[PREMIUM] > 0.97
    assert met[STANDARD] > 0.95
    assert paced.now_s < 1.05 * free.now_s, "at nearly the same throughput"


@pytest.mark.parametrize("seqs", [8, 16, 32])
def test_no_cap_on_the_batch_meets_as_many_objectives(seqs):
    requests = asked(20)
    _, met = served(InPace(DEFAULT_TIERS), requests)
    _, capped = served(ByPriority(), requests, replace(SETUP, max_seqs=seqs))
    promised = (PREMIUM, STANDARD)
    assert sum(met[tier] for tier in promised) > sum(capped[tier] for tier in promised)


def test_without_objectives_it_is_ours():
    requests = asked(20, dict.fromkeys(TPOT_S))
    ends = [
        {one.asked.name: one.token_s for one in served(way(DEFAULT_TIERS), requests)[0].done}
        for way in (Ours, InPace)
    ]
    assert ends[0] == ends[1]


def test_memory_that_is_short_and_pace_go_together():
    """Blocks balance, everybody ends, and premium loses neither memory nor pace."""
    parts = []
    for seed in range(1, 5):
        engine, met = served(InPace(DEFAULT_TIERS), asked(14, seed=seed), replace(SETUP, blocks=300))
        assert any(one.preemptions for one in engine.done)
        assert not any(one.preemptions for one in engine.done if one.asked.tier == PREMIUM)
        parts.append(met[PREMIUM])
    assert mean(parts) > 0.97
