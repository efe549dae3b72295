"""Who gets a place in the batch, and which places are kept for the top tier."""

import math

import pytest
from pressure_steps import LOW, MIDDLE, TOP, kv_is_on_its_way, their_clients_leave
from real_schedulers import BLOCK
from vllm.v1.request import RequestStatus

from decode_node.engine import admission
from slo.decode.admission import starts
from slo.decode.predicted_peak import Pool

pytestmark = pytest.mark.slow


def test_while_all_places_are_taken_nobody_is_looked_at(stepped, monkeypatch):
    engine = stepped(5000, max_num_seqs=4)
    for number in range(100):
        engine.add(str(number), 16, 50)
    engine.step()
    assert len(engine.scheduler.running) == 4
    looks = []
    monkeypatch.setattr(Pool, "fits", lambda *_: looks.append(1))
    engine.step()
    assert looks == []
    monkeypatch.undo()
    engine.finish()


def test_places_are_kept_for_the_top_tier_once_it_has_come(stepped, monkeypatch):
    engine = stepped(5000, max_num_seqs=20)
    for number in range(30):
        engine.add(f"early{number}", 16, 8, tier=LOW)
    engine.step()
    assert len(engine.scheduler.running) == 20, "nothing is kept for a tier that nobody has asked for"
    engine.add("first", 16, 5, tier=TOP)
    for number in range(40):
        engine.add(f"low{number}", 16, 60, tier=LOW)
    for _ in range(30):
        engine.step()
    assert "first" in engine.finished
    assert len(engine.scheduler.running) == 19
    looks = []
    monkeypatch.setattr(Pool, "fits", lambda *_: looks.append(1))
    engine.step()
    assert looks == [], "nobody that waits may have the place"
    monkeypatch.undo()
    engine.add("top", 16, 10, tier=TOP)
    assert "top" in engine.step().num_scheduled_tokens
    engine.finish()


@pytest.mark.parametrize("places", [4, 20])
def test_a_place_that_becomes_free_goes_to_the_highest_tier_whoever_waits_for_longer(stepped, places):
    engine = stepped(5000, max_num_seqs=places)
    for number in range(places):
        engine.add(f"early{number}", 16, 60 if number else 5, tier=LOW)
    engine.step()
    for number in range(6):
        engine.add(f"low{number}", 16, 60, tier=LOW)
    engine.add("mid", 16, 60, tier=MIDDLE)
    while "early0" not in engine.finished:
        engine.step()
    engine.step()
    started = [request.request_id for request in engine.scheduler.running]
    assert "mid" in started
    assert len(started) == places
    engine.finish()


def test_one_of_the_top_tier_takes_the_last_place_where_none_is_kept_any_more(stepped):
    engine = stepped(5000, max_num_seqs=20)
    for name in ("top0", "top1"):
        engine.add(name, 16, 60, tier=TOP)
    for number in range(18):
        engine.add(f"early{number}", 16, 60 if number else 5, tier=LOW)
    engine.step()
    assert len(engine.scheduler.running) == 20
    engine.add("low", 16, 60, tier=LOW)
    engine.add("top2", 16, 60, tier=TOP)
    while "early0" not in engine.finished:
        engine.step()
    engine.step()
    started = [request.request_id for request in engine.scheduler.running]
    assert "top2" in started
    assert "low" not in started
    engine.finish()


def test_streams_whose_kv_is_on_its_way_take_no_place_that_is_kept(stepped):
    engine = stepped(5000, max_num_seqs=20)
    engine.add("first", 16, 5, tier=TOP)
    engine.step()
    scheduler = engine.scheduler
    kv_is_on_its_way(engine, 18)
    for number in range(4):
        engine.add(f"low{number}", 20, 60, tier=LOW)
    engine.step()
    assert len(scheduler.running) == 2, "one has the place that is left beside those"
    their_clients_leave(engine, 18)
    engine.finish()


@pytest.mark.parametrize("what", ["nothing", "an end", "an arrival", "a client that leaves", "time"])
def test_while_memory_is_full_those_that_wait_are_asked_again_only_when_something_has_changed(
    stepped, monkeypatch, what
):
    engine, asked = stepped(25), []
    for number in range(2):
        engine.add(f"runs{number}", 8 * BLOCK - number, 30 + 10 * number)
    for number in range(30):
        engine.add(f"waits{number}", 8 * BLOCK, 40)
    monkeypatch.setattr(admission, "_LOOKS_AGAIN_S", math.inf)
    monkeypatch.setattr(admission, "starts", lambda *given: asked.append(1) or starts(*given))
    engine.step()
    assert len(engine.scheduler.running) == 2
    engine.step()
    asked.clear()
    for _ in range(10):
        engine.step()
    assert not asked
    match what:
        case "an end":
            while not engine.finished:
                engine.step()
        case "an arrival":
            engine.add("new", BLOCK, 4)
        case "a client that leaves":
            engine.scheduler.finish_requests(["waits3"], RequestStatus.FINISHED_ABORTED)
        case "time":
            monkeypatch.setattr(admission, "_LOOKS_AGAIN_S", 0.0)
    engine.step()
    assert bool(asked) == (what != "nothing")
    if what == "an end":
        assert len(engine.scheduler.running) == 2, "the first one that waits has started at once"
    engine.finish()
