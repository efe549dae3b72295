"""Streams that leave for another replica, and come back."""

import time

import pytest
from pressure_steps import LOW, TOP, expects, knows_steps
from vllm.v1.request import RequestStatus

from decode_node.requests.leaving import LEFT, MAY_LEAVE_XARG
from slo.request import JOB_XARG

pytestmark = pytest.mark.slow


def leaves(engine, job):
    """A low stream that may leave, beside others that would wait for long if it was computed again here."""
    knows_steps(engine, fixed_s=0.001, prompt_s=0.001)
    expects(engine, 1)
    engine.add("low", 100, 300, tier=LOW, **{MAY_LEAVE_XARG: True, JOB_XARG: job})
    for number in range(3):
        engine.add(f"top{number}", 100, 250, tier=TOP)
    while "low" not in engine.finished:
        engine.step()


def test_one_that_leaves_ends_with_the_word_for_it_and_frees_its_memory(stepped):
    engine = stepped(50)
    leaves(engine, "job")
    assert engine.why["low"] == LEFT
    assert not engine.preempted
    assert engine.scheduler._report.figures.preempted == [(LOW, "cost", "reprefill")]
    assert "low" not in engine.scheduler.requests
    engine.check_blocks()
    engine.finish()


def test_one_that_comes_back_is_no_newcomer_and_has_been_through_it_before(stepped):
    engine = stepped(50)
    leaves(engine, "job")
    emitted = len(engine.tokens["low"])
    engine.add("new", 40, 5, tier=LOW)
    back = engine.add("back", 100 + emitted, 300 - emitted, tier=LOW, **{JOB_XARG: "job"})
    view, now_s = engine.scheduler._view, time.monotonic()
    assert view.preemptions(back) == 1
    assert back.num_preemptions == 0, "by which vLLM tells a request that its workers know"
    assert not view.parked(back, now_s).is_newcomer
    account = engine.scheduler._book.accounts["back"]
    assert account.first_s < account.parked_s, "its pace counts from its first token on"
    assert view.parked(back, now_s).preemptions == 1
    assert not engine.scheduler._leavers.away
    engine.finish()
    assert len(engine.tokens["back"]) == 300 - emitted
    assert LOW in [tier for tier, _ in engine.scheduler._report.figures.restored]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
@pytest.mark.parametrize("pulls_now", [False, True], ids=["waits", "is pulling"])
def test_one_that_is_back_and_does_not_get_its_kv_is_remembered_however_that_ends(stepped, status, pulls_now):
    engine = stepped(60)
    leaves(engine, "job")
    emitted = len(engine.tokens["low"])
    scheduler = engine.scheduler
    back = engine.add("back", 100 + emitted, 300 - emitted, tier=LOW, **{JOB_XARG: "job"})
    scheduler._book.accounts["back"].pulls = True
    if pulls_now:  # its blocks are freed only once nothing is written to them any more
        scheduler.waiting.remove_request(back)
        back.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        scheduler.skipped_waiting.add_request(back)
    scheduler.finish_requests("back", status)
    assert scheduler._leavers.away["job"].preemptions == 1
    again = engine.add("again", 100 + emitted, 300 - emitted, tier=LOW, **{JOB_XARG: "job"})
    assert not scheduler._view.parked(again, time.monotonic()).is_newcomer
    if pulls_now:
        scheduler._free_blocks(back)
    assert not scheduler._leavers.away
    engine.finish()


def test_one_that_does_not_come_back_is_forgotten(stepped, monkeypatch):
    monkeypatch.setattr("decode_node.engine.leavers._MOST_AWAY", 1)
    engine = stepped(50)
    leaves(engine, "first")
    assert list(engine.scheduler._leavers.away) == ["first"]
    engine.finish()
    engine.finished.clear()
    engine.tokens.pop("low")
    leaves_again = {MAY_LEAVE_XARG: True, JOB_XARG: "second"}
    engine.add("low", 100, 300, tier=LOW, **leaves_again)
    for number in range(3, 6):
        engine.add(f"top{number}", 100, 250, tier=TOP)
    while "low" not in engine.finished:
        engine.step()
    assert list(engine.scheduler._leavers.away) == ["second"]


def test_whose_memory_is_taken_here_has_nothing_to_pull_any_more(stepped):
    engine = stepped(24)
    expects(engine, 1)
    for name in ("a", "b", "c"):
        engine.add(name, 100, 100)
        engine.scheduler._book.accounts[name].pulls = True  # as of every request that was prefilled elsewhere
    while not engine.preempted:
        engine.step()
    assert not engine.scheduler._book.accounts[engine.preempted[0]].pulls
    before = engine.scheduler._leavers.takes
    engine.finish()
    assert engine.scheduler._leavers.takes == pytest.approx(before, rel=0.1), "nobody has come back"
