"""A decode replica of a fleet that gives its memory out in blocks."""

from dataclasses import replace
from statistics import fmean

import pytest
from simulated_fleet import DECODE, check_at_rest, fleet, stream

from simulator.cost.decode_steps import DecodeModel
from simulator.fleet.decode import Decoding, VirtualDecodeReplica
from simulator.fleet.fleet import simulate
from simulator.fleet.pressed_decode import PressedDecodeReplica
from simulator.fleet.setup import DecodeMemory, Failure
from simulator.planning.decode_plan import min_decode_replicas
from simulator.planning.files import parse_fleet
from simulator.planning.plan import PlannedLoad, plan
from simulator.pressure.engine import PressedSetup
from simulator.pressure.ours import Ours
from simulator.pressure.ways import FirstCome
from simulator.replica.loop import EventLoop
from simulator.workload.arrivals import Kind, Mix
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM

MODEL = DecodeModel(0.01, 1e-4, 1e-8, 0.0, kv_tokens=16 * 1000)
SMALL = replace(DECODE, kv_tokens=10_000)
CHAT_AND_BATCH = Mix(
    {
        "chat": Kind(0.5, 640, 0.4, PREMIUM, output_tokens=60),
        "batch": Kind(0.5, 3000, None, BACKGROUND, output_tokens=200),
    }
)
IN_BLOCKS = [DecodeMemory.VLLM, DecodeMemory.PRESSURE]


def decoded(replica_of, requests, pull_s=0.0):
    """Every request of (time, tier, prompt, output), its KV there `pull_s` after it has memory."""
    loop = EventLoop()
    replica, ended, items = replica_of(loop), [], []

    def come(number, tier, prompt, output):
        def pull():
            loop.call_at(loop.now_s + pull_s, lambda: item.gone or replica.join(item))

        item = Decoding(prompt, output, pull, ended.append, name=str(number), tier=tier)
        items.append(item)
        replica.admit(item)

    for number, (at_s, *request) in enumerate(requests):
        loop.call_at(at_s, come, number, *request)
    loop.run()
    assert len(ended) == len(requests)
    return items, replica


def pressed(way, blocks=1000):
    return lambda loop: PressedDecodeReplica(loop, PressedSetup(MODEL, 1e-4, blocks), way, DEFAULT_TIERS)


@pytest.mark.parametrize("way", [FirstCome, lambda: Ours(DEFAULT_TIERS)], ids=["vllm", "ours"])
def test_with_enough_memory_answers_take_as_long_as_where_it_is_reserved(way):
    requests = [(0.1 * number, PREMIUM, 100, 20 + number) for number in range(20)]
    reserved, _ = decoded(lambda loop: VirtualDecodeReplica(loop, MODEL), requests, pull_s=0.05)
    in_blocks, replica = decoded(pressed(way()), requests, pull_s=0.05)
    for one, other in zip(in_blocks, reserved, strict=True):
        assert one.tpot_s == pytest.approx(other.tpot_s, rel=0.02)
        assert one.first_token_s == pytest.approx(other.first_token_s, abs=0.025), "two steps at most"
    assert replica.kv_usage == 0.0
    assert replica.tokens == sum(request[-1] for request in requests)
    assert replica.waited == 0


def test_premium_does_not_wait_for_background_that_fills_the_memory():
    crowd = [(0.0, BACKGROUND, 400, 300) for _ in range(12)]
    requests = [*crowd, *((1.0 + number, PREMIUM, 400, 50) for number in range(5))]
    ours, _ = decoded(pressed(Ours(DEFAULT_TIERS), blocks=250), requests)
    theirs, _ = decoded(pressed(FirstCome(), blocks=250), requests)
    assert max(one.tpot_s for one in ours[12:]) < 0.02
    waits = [
        [one.first_token_s - at_s for one, (at_s, *_) in zip(each[12:], requests[12:], strict=True)]
        for each in (ours, theirs)
    ]
    assert max(waits[0]) < 0.1
    assert max(waits[1]) > 1.0


def test_memory_that_is_held_while_kv_is_pulled_comes_back_when_it_does_not_come():
    loop = EventLoop()
    replica = pressed(FirstCome(), blocks=30)(loop)
    joined = []
    first, second = (
        Decoding(400, 5, lambda: joined.append(loop.now_s), lambda _: None, name=name, tier=PREMIUM)
        for name in "ab"
    )
    replica.admit(first)
    replica.admit(second)
    loop.run()
    assert len(joined) == 1
    assert replica.kv_usage == pytest.approx(25 / 30)
    assert replica.waited == 1
    replica.withdraw(first)
    loop.run()
    assert len(joined) == 2
    replica.withdraw(second)
    assert replica.kv_usage == 0.0


@pytest.mark.parametrize("memory", IN_BLOCKS)
def test_a_fleet_serves_all_and_holds_nothing_afterwards(memory):
    small = replace(DECODE, kv_tokens=12_000)
    result = simulate(fleet(decode=small, decode_memory=memory), stream(0.9), [Failure(0, 3.0, 6.0)])
    check_at_rest(result)
    assert result.waited_for_memory > 0
    assert 0 < result.decode_kv_usage < 1


def test_answers_that_end_between_two_reports_leave_nothing_behind_at_the_router():
    setup = fleet(decode=SMALL, decode_replicas=5, decode_memory=DecodeMemory.PRESSURE)
    results = [simulate(setup, CHAT_AND_BATCH.stream(6.0, 400, seed)) for seed in (3, 4, 5)]
    assert fmean(result.taken_by_decode[BACKGROUND] for result in results) >= 0.95


def test_a_plan_that_lets_those_wait_who_may_needs_fewer_decode_replicas():
    arrivals = CHAT_AND_BATCH.stream(6.0, 400, 3)
    found = {
        memory: min_decode_replicas(fleet(decode=SMALL, decode_memory=memory), arrivals, 6.0, 0.95)
        for memory in (DecodeMemory.RESERVED, DecodeMemory.PRESSURE)
    }
    assert found[DecodeMemory.PRESSURE] < found[DecodeMemory.RESERVED]
    planned = plan(
        fleet(decode=SMALL, decode_memory=DecodeMemory.PRESSURE), PlannedLoad(CHAT_AND_BATCH, 6.0, 400, 3)
    )
    assert planned.decode_replicas <= found[DecodeMemory.RESERVED]
    assert planned.tpot_by_tier[PREMIUM] >= 0.95
    assert planned.best.reaches(0.95)


def test_the_file_names_it():
    values = {
        "rate_rps": 1,
        "decode": {"memory": "pressure"},
        "workload": {"kinds": {"chat": {"share": 1, "mean_tokens": 100, "ttft_ms": 500}}},
    }
    assert parse_fleet(values).setup().decode_memory is DecodeMemory.PRESSURE
