"""Whose memory is taken, and whose is not."""

import pytest
from pressure_steps import LOW, MIDDLE, TOP, expects, one_has_lost_its_memory, reasons
from vllm.v1.request import RequestStatus

from decode_node.engine.setup import DecodeSetup
from decode_node.scheduler import CarryingScheduler
from slo.decode.victims import STABLE_TOKENS, VictimReason

pytestmark = pytest.mark.slow


def test_who_runs_out_of_memory_takes_it_from_the_lower_tier(stepped):
    engine = stepped(24)
    expects(engine, 1)  # the prediction is far too low, so that all are admitted
    engine.add("top", 100, 200, tier=TOP)
    engine.add("low", 100, 120, tier=LOW)
    engine.add("mid", 100, 120, tier=MIDDLE)
    engine.finish()
    assert engine.preempted
    assert "top" not in engine.preempted
    assert engine.preempted[0] == "low"
    assert VictimReason.VLLM.value not in reasons(engine)


def test_vllm_would_have_taken_it_from_whoever_came_last(stepped):
    engine = stepped(24, CarryingScheduler)
    for name, tier in (("low", LOW), ("mid", MIDDLE), ("top", TOP)):
        engine.add(name, 100, 120, tier=tier)
    engine.finish()
    assert engine.preempted[0] == "top"


def test_a_stream_that_has_just_started_is_spared(stepped):
    engine = stepped(38)
    expects(engine, 1)
    for name in ("one", "two", "three"):
        engine.add(name, 120, 64)
    for _ in range(40):
        engine.step()
    engine.add("fresh", 16, 200)
    while not engine.preempted:
        engine.step()
    assert 0 < engine.scheduler.requests["fresh"].num_output_tokens < STABLE_TOKENS
    assert engine.preempted[0] != "fresh"
    engine.finish()


def test_the_third_time_another_one_goes(stepped):
    engine = stepped(20)
    expects(engine, 1)
    for name in ("a", "b", "c", "d"):
        engine.add(name, 60, 160)
    engine.finish()
    counted = {name: engine.preempted.count(name) for name in engine.preempted}
    immune = [reason for reason in reasons(engine) if reason == VictimReason.IMMUNE.value]
    assert sum(counted.values()) > 2
    assert max(counted.values()) <= 2 + len(immune)


def test_aborted_while_its_memory_is_taken(stepped):
    engine = stepped(24)
    name = one_has_lost_its_memory(engine, 100)
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    engine.finish()
    assert name not in engine.finished
    for left in (
        engine.scheduler._book.accounts,
        engine.scheduler._book.parked,
        engine.scheduler._book.restoring,
    ):
        assert not left


def test_own_tiers_are_ranked_as_they_are_configured(stepped):
    setup = DecodeSetup({"gold": 5.0, "tin": 1.0})
    engine = stepped(24, additional=setup.encode())
    expects(engine, 1, ("gold", "tin"))
    engine.add("gold", 100, 200, tier="gold")
    engine.add("tin", 100, 150, tier="tin")
    engine.add("also", 100, 150, tier="gold")
    engine.finish()
    assert engine.preempted
    assert engine.preempted[0] == "tin"
