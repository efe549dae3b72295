"""A decode engine in virtual time that runs out of memory: blocks balance, all end, and enough is enough."""

import math
from functools import partial
from random import Random

import pytest

from simulator.cost.decode_steps import DecodeModel
from simulator.pressure.decoding import PressedRequest
from simulator.pressure.engine import PressedEngine, PressedSetup
from simulator.pressure.ours import Ours
from simulator.pressure.ways import (
    ByPriority,
    FirstCome,
    LeastComputed,
    NoEviction,
    Retract,
    RetractForPriority,
)
from slo.decode.victims import TakenBy
from slo.tiers import DEFAULT_TIERS, PREMIUM, STANDARD, Tier

BACKGROUND = Tier("background")
MODEL = DecodeModel(weights_s=0.01, request_s=1e-4, kv_token_s=1e-8, fixed_s=0.0, kv_tokens=1 << 40)
WAYS = {
    "first come": FirstCome,
    "watermark": partial(FirstCome, 0.05),
    "priority": ByPriority,
    "least computed": LeastComputed,
    "retract": Retract,
    "retract for priority": RetractForPriority,
    "no eviction": NoEviction,
    "ours": partial(Ours, DEFAULT_TIERS),
}


def asked(seconds=20, rate=6, seed=1):
    rng = Random(seed)
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        tier = rng.choice([PREMIUM, STANDARD, BACKGROUND])
        answer = min(500, max(2, round(100 * rng.lognormvariate(0, 0.8))))
        found.append(PressedRequest(f"r{len(found)}", tier, at_s, rng.randint(50, 400), answer, 500))
    return found


def engine(way, blocks, **more):
    setup = PressedSetup(MODEL, 1e-4, blocks, **more)
    return PressedEngine(setup, WAYS[way](), DEFAULT_TIERS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("host", [{}, {"host_blocks": 60, "block_s": 1e-4}], ids=["none", "host memory"])
def test_all_end_once_with_all_their_tokens_and_no_block_is_lost(way, host):
    requests = asked()
    served = engine(way, 120, **host)
    done = served.run(requests)
    assert {one.asked.name: one.emitted for one in done} == {one.name: one.answer for one in requests}
    assert len(done) == len(requests)
    assert served.free_blocks == 120
    assert served.free_host_blocks == host.get("host_blocks", 0)
    assert all(gap > 0 for one in done for gap in one.gaps_s)
    least = sum(one.answer for one in requests)
    assert served.computed - served.again >= least
    if way != "no eviction":
        assert any(one.preemptions for one in done), "memory was never short"
    else:
        assert not any(one.preemptions for one in done)
    if way == "ours" and host:
        without = engine(way, 120)
        without.run(requests)
        assert served.again < without.again


@pytest.mark.parametrize("way", WAYS)
def test_with_enough_memory_all_ways_are_one(way):
    requests = asked()
    done, first = [engine(name, 1 << 30).run(requests) for name in (way, "first come")]
    assert not any(one.preemptions for one in done)
    ends = [{one.asked.name: one.token_s for one in each} for each in (done, first)]
    assert ends[0] == ends[1]


def test_whoever_came_last_computes_again_what_the_cheapest_would_not():
    requests = asked(rate=8)
    again = {
        way: (served := engine(way, 120)).run(requests) and served.again for way in ("first come", "ours")
    }
    assert again["ours"] < 0.7 * again["first come"]


def test_whoever_comes_back_computes_nothing_that_nobody_has_overwritten():
    served = engine("first come", 40)
    served.arrives(PressedRequest("a", STANDARD, 0.0, 300, 10, 10))
    served.step()
    (one,) = served.running
    served.take(one, TakenBy.RECOMPUTE)
    assert served.free_blocks == 40
    served.step()
    assert (one.computed, served.again) == (301, 300 % 16)


def test_whoever_comes_back_from_host_memory_finds_what_nobody_has_overwritten():
    served = engine("first come", 40, host_blocks=40, block_s=0.01)
    for name in "ab":
        served.arrives(PressedRequest(name, STANDARD, 0.0, 200, 40, 40))
    served.step()
    for _ in range(3):
        for one in [*served.running]:
            served.take(one, TakenBy.SWAP)
        assert served.free_blocks == 40
        started_s = served.now_s
        served.step()
        assert served.now_s - started_s < served.setup.model.step_s(2, 500) + 2 * 0.011, "two blocks move"
    assert (served.again, served.free_host_blocks) == (0, 40)


def test_with_host_memory_for_all_nothing_is_computed_again():
    requests = asked(rate=8)
    served = engine("ours", 120, host_blocks=1000, block_s=1e-5)
    done = served.run(requests)
    assert any(one.preemptions for one in done)
    assert served.again == 0


def test_a_prompt_that_is_not_pulled_is_computed():
    alone = [PressedRequest("a", STANDARD, 0.0, 200, 2, 10)]
    (one,) = engine("first come", 100, pulls=False, chunk_tokens=64).run(alone)
    assert one.ttft_s == pytest.approx(200 * 1e-4 + 4 * 0.01, rel=0.05)
    (pulled,) = engine("first come", 100).run(alone)
    assert pulled.ttft_s == pytest.approx(0.01, rel=0.05)


def test_a_first_token_from_prefill_came_as_the_request_did():
    asked = PressedRequest("a", STANDARD, 1.0, 16, 11, 20, 0.001, 0.02, has_first=True)
    served = engine("first come", 100)
    (one,) = served.run([asked])
    assert (one.token_s[0], one.ttft_s, one.emitted, served.computed) == (1.0, 0.0, 11, 10)
    assert one.is_met


def test_an_answer_that_its_first_token_is_all_of_ends():
    served = engine("first come", 100)
    served.arrives(PressedRequest("a", STANDARD, 0.0, 16, 1, 20, has_first=True))
    for _ in range(3):
        served.step()
    assert [one.asked.name for one in served.done] == ["a"]
    assert served.free_blocks == 100


def test_one_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="a does not fit into 3 blocks"):
        engine("first come", 3).run([PressedRequest("a", STANDARD, 0.0, 200, 2, 10)])


def test_objectives_count_the_first_token_and_the_mean_of_the_others():
    (one,) = engine("first come", 100).run(
        [PressedRequest("a", STANDARD, 1.0, 16, 11, 20, ttft_s=0.02, tpot_s=0.011)]
    )
    assert one.tpot_s == pytest.approx(0.01, rel=0.02)
    assert one.is_met
    assert one.credit_s(one.token_s[-1]) == pytest.approx(0.01, rel=0.1)
    assert math.isinf(
        engine("ours", 100).run([PressedRequest("b", STANDARD, 0.0, 16, 3, 5)])[0].credit_s(1.0)
    )


def test_in_an_overload_that_lasts_standard_is_served_and_the_background_gets_a_part():
    rng, requests, at_s, seconds = Random(3), [], 0.0, 40
    while (at_s := at_s + rng.expovariate(20)) < seconds:
        (tier,) = rng.choices([PREMIUM, STANDARD, BACKGROUND], [1, 3, 6])
        answer = rng.randint(20, 200) if tier == BACKGROUND else rng.randint(10, 60)
        requests.append(PressedRequest(f"r{len(requests)}", tier, at_s, rng.randint(50, 200), answer, 500))
    done = engine("ours", 120).run(requests)
    waits_s = {
        tier: [one.ttft_s for one in done if one.asked.tier == tier] for tier in (STANDARD, BACKGROUND)
    }
    assert max(waits_s[BACKGROUND]) > 30  # more comes than it can serve
    assert max(waits_s[STANDARD]) < 5
    meanwhile = [one for one in done if one.asked.tier == BACKGROUND and one.token_s[-1] < seconds]
    assert len(meanwhile) > 50


def test_one_that_does_not_fit_beside_the_top_tier_keeps_no_lower_tier_waiting():
    memory, ends_s = 1000 * 16, 60.0
    model = DecodeModel(weights_s=0.02, request_s=0.0, kv_token_s=0.0, fixed_s=0.0, kv_tokens=memory)
    served = PressedEngine(PressedSetup(model, 1e-5, 1000), Ours(DEFAULT_TIERS), DEFAULT_TIERS)
    # Four of the top tier hold a fifth of the memory all the time.
    requests = [
        PressedRequest(f"top{n}", PREMIUM, n / 2, memory // 20, 100, 4000) for n in range(int(2 * ends_s))
    ]
    requests.append(PressedRequest("large", STANDARD, 10.0, memory * 4 // 5, 100, 100))
    requests += [
        PressedRequest(f"{tier}{n}", tier, 10.5 + 5 * n, 100, 50, 500)
        for n in range(8)
        for tier in (STANDARD, BACKGROUND)
    ]
    done = {one.asked.name: one for one in served.run(requests)}
    small = [one for one in done.values() if one.asked.prompt == 100]
    assert len(small) == 16
    assert all(one.ttft_s < 5 for one in small)
    assert ends_s - 1 < done["large"].token_s[0] < ends_s + 5, "once the top tier leaves room"
