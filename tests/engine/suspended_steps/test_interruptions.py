"""Aborts and pauses while a step is suspended: nothing is left behind, and the rest ends right."""

import math

import pytest
from suspending import LONG, MIDDLE, SHORT, alone, assert_same_output, chunks_of, suspend
from vllm.v1.core.sched.interface import PauseState

from prefill_node.board.events import Dropped, Stopped
from slo.predict.prefill_time import attention_pairs
from slo.queue.chunks import StopBound


def test_an_aborted_request_leaves_nothing_behind_while_it_is_suspended(running):
    suspend(running, "long", LONG, 2, beneficiary="short")
    assert running.rpc("checkpoints_held")[0] == 1
    running.abort("long")
    running.add("short", SHORT)
    assert running.step() == ["short"]
    running.check_at_rest()
    assert any(isinstance(notice, Dropped) and notice.reason == "abandoned" for notice in running.notices())


def test_a_request_that_is_aborted_in_the_very_step_that_stops(running):
    running.notices()
    running.add("long", LONG)
    leave_in_the_step_that_stops(running, "long")
    running.check_at_rest()
    (stopped,) = [notice for notice in running.notices() if isinstance(notice, Stopped)]
    assert (stopped.jobs, stopped.tokens, stopped.pairs) == ((), len(LONG), attention_pairs(len(LONG), 0))


def leave_in_the_step_that_stops(running, name):
    """The client of the only request leaves while it runs."""
    running.stop_at(2)
    (engine_id,) = running.scheduler.requests
    running.core.aborts_queue.put([engine_id])
    running.abort_frontend(name)
    assert running.step() == []


@pytest.mark.parametrize("leaves", ["between two chunks", "in a chunk", "in a suspended chunk"])
def test_whose_client_leaves_has_computed_its_chunks_for_nobody(running, leaves):
    running.notices()
    running.add("long", LONG, stop_bound=chunks_of(256))
    assert running.step() == []
    if leaves == "in a chunk":
        leave_in_the_step_that_stops(running, "long")
    else:
        if leaves == "in a suspended chunk":
            running.stop_at(2)
            assert running.step() == []
        running.abort("long")
    said = running.notices()
    (dropped,) = [notice for notice in said if isinstance(notice, Dropped)]
    chunk = 256, attention_pairs(256, 0)
    assert (dropped.jobs, dropped.reason) == (("long",), "abandoned")
    if leaves == "in a suspended chunk":
        assert 0 < dropped.done < 1
        assert (dropped.tokens, dropped.pairs) == (256, attention_pairs(256, 256))
        assert (dropped.earlier_tokens, dropped.earlier_pairs) == chunk
    else:
        assert (dropped.done, dropped.tokens, dropped.pairs, dropped.earlier_tokens) == (1.0, *chunk, 0)
    stopped = [(notice.tokens, notice.pairs) for notice in said if isinstance(notice, Stopped)]
    assert stopped == ([] if leaves == "between two chunks" else [(256, attention_pairs(256, 256))])
    running.prefill("free", SHORT, stop_bound=StopBound(math.inf, ()))
    running.check_at_rest()


def test_the_others_of_a_suspended_step_go_on_when_one_is_aborted(running):
    expected = alone(running, other=MIDDLE)
    running.add("short", SHORT)
    running.add("other", MIDDLE)
    running.stop_at(2)
    assert running.step() == []
    (suspended,) = running.scheduler._suspensions.steps
    assert suspended.pairs == attention_pairs(len(SHORT), 0) + attention_pairs(len(MIDDLE), 0)
    running.abort("short")
    assert suspended.pairs == attention_pairs(len(MIDDLE), 0)
    running.stop_at()
    assert running.step() == ["other"]
    assert running.answers["other"].tokens == expected["other"].tokens
    assert min(boundary for _, boundary in running.rpc("trace")[0]) == 2, "it started over"


def test_a_waiting_request_can_be_aborted_while_another_is_suspended(running):
    expected = alone(running, long=LONG)
    suspend(running, "long", LONG, 2, beneficiary="short")
    running.add("short", SHORT)
    running.abort("short")
    running.finish()
    assert running.answers == expected


def test_nothing_runs_while_everything_is_paused(running):
    expected = alone(running, long=LONG)
    suspend(running, "long", LONG, 2)
    running.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert running.step() == []
    running.scheduler.set_pause_state(PauseState.UNPAUSED)
    running.finish()
    assert running.answers == expected


def test_suspended_steps_are_finished_in_a_pause_that_starts_nothing_new(running):
    suspend(running, "long", LONG, 2)
    running.add("new", SHORT)
    running.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert running.step() == ["long"]
    assert running.step() == []
    running.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert running.step() == ["new"]


def test_sleep_aborts_what_is_suspended(running):
    suspend(running, "long", LONG, 2)
    running.core.sleep(level=1)
    running.abort_frontend("long")
    running.core.resume_scheduler()
    running.check_at_rest()


def test_a_pause_that_clears_the_cache_has_suspended_steps_start_over(running):
    expected = alone(running, long=LONG)
    suspend(running, "long", LONG, 2)
    running.core.pause_scheduler(mode="keep", clear_cache=True)
    running.core.resume_scheduler()
    running.stop_at()
    running.finish()
    assert_same_output(running, expected)
    assert min(boundary for _, boundary in running.rpc("trace")[0]) == 0
    assert any(isinstance(notice, Dropped) and notice.reason == "memory" for notice in running.notices())
