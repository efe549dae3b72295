"""What is learned of the way through the prefill tier."""

from types import SimpleNamespace

import pytest

from decode_node.engine.accounts import StreamAccount
from decode_node.engine.leavers import Leavers

ALONE_S = 0.1
WAY_S = 0.5


def account(arrived_s, job="job"):
    request = SimpleNamespace(request_id=job, sampling_params=None, kv_transfer_params=None)
    return StreamAccount.of(request, arrived_s)


def one(computed=100, tokens=101):
    """A request, of whose tokens so many have been computed."""
    return SimpleNamespace(num_computed_tokens=computed, num_tokens=tokens)


def is_away(leavers, waits_s):
    """A stream leaves, comes back after 0.3 s, waits for memory, and has its KV after further 0.2 s."""
    leavers.leave(one(), account(0.0), 1, 10.0)
    back = account(10.3)
    assert leavers.is_back(back, 10.3)
    back.pulls_since_s = 10.3 + waits_s
    leavers.took(back, ALONE_S, back.pulls_since_s + 0.2)


@pytest.mark.parametrize("waits_s", [0.0, 3.0])
def test_the_wait_for_memory_is_no_part_of_the_way(waits_s):
    leavers = Leavers()
    for _ in range(100):
        is_away(leavers, waits_s)
    assert leavers.takes == pytest.approx(WAY_S / ALONE_S, rel=0.01)


@pytest.mark.parametrize("computed", [0, 100, 1000])
def test_one_that_leaves_while_it_computes_again_teaches_by_all_that_prefill_computes(computed):
    leavers = Leavers()
    for _ in range(100):
        leavers.leave(one(computed, 1001), account(0.0), 1, 10.0)
        back = account(10.3)
        assert leavers.is_back(back, 10.3)
        back.pulls_since_s = 10.3
        leavers.took(back, max(back.lost_tokens, 1) * ALONE_S / 1000, 10.5)
    assert leavers.takes == pytest.approx(WAY_S / ALONE_S, rel=0.01)


def test_one_alone_teaches_little():
    leavers = Leavers()
    before = leavers.takes
    leavers.leave(one(), account(0.0), 1, 10.0)
    back = account(100.0)
    assert leavers.is_back(back, 100.0)
    back.pulls_since_s = 100.0
    leavers.took(back, ALONE_S, 100.0)
    assert before < leavers.takes < 1.5 * before


def test_one_that_waited_long_before_it_left_is_known_when_it_comes_back():
    leavers = Leavers()
    waited = account(0.0)
    waited.parked_s = 0.0
    leavers.leave(one(), waited, 1, 700.0)
    leavers.leave(one(), account(0.0, "another"), 1, 701.0)
    assert leavers.is_back(account(702.0), 702.0)


def test_however_long_one_is_away_it_is_known_and_its_way_teaches():
    leavers = Leavers()
    before = leavers.takes
    request = one()
    leavers.leave(request, account(0.0), 1, 10.0)
    leavers.leave(request, account(0.0, "another"), 1, 5000.0)
    back = account(5001.0)
    assert leavers.is_back(back, 5001.0)
    assert (back.arrived_s, back.parked_s, back.preemptions_before) == (0.0, 10.0, 1)
    back.pulls_since_s = 5001.0
    leavers.took(back, ALONE_S, 5001.2)
    assert leavers.takes > before


def test_those_that_are_away_are_not_looked_at_with_each_that_leaves():
    looked_at = []

    class Remembered:
        @property
        def left_s(self):
            looked_at.append(self)
            return 0.0

    leavers = Leavers()
    for number in range(100):
        remembered = SimpleNamespace(job=f"{number}", leaves=lambda *_: Remembered())
        leavers.leave(one(), remembered, 1, 10.0)
    assert len(leavers.away) == 100
    assert not looked_at


def test_one_that_leaves_once_more_keeps_nobody_from_being_forgotten(monkeypatch):
    monkeypatch.setattr("decode_node.engine.leavers._MOST_AWAY", 2)
    leavers = Leavers()
    request = one()
    for job, now_s in (("twice", 0.0), ("once", 1.0), ("twice", 500.0), ("last", 700.0)):
        leavers.leave(request, account(0.0, job), 1, now_s)
    assert list(leavers.away) == ["twice", "last"]
