"""Suspended steps and those that wait run in order of urgency, as short as they must be."""

import math
import time
from dataclasses import replace

import pytest
from engines import engine, random_prompt
from suspending import LONG, MIDDLE, SHORT, alone, assert_same_output, chunks_of, suspend
from vllm.sampling_params import StructuredOutputsParams
from waiting import assert_soon

from prefill_node.board.events import Dropped, Passed, Resumed, Served, Started, Stopped
from slo.preemption.types import Limits
from slo.queue.arrival_forecast import Forecast
from slo.queue.chunks import StopBound
from slo.request import CACHED_XARG


def test_several_suspended_at_once_are_served_in_order_of_urgency(running):
    expected = alone(running, long=LONG, middle=MIDDLE, short=SHORT)
    suspend(running, "long", LONG, 2, beneficiary="middle")
    suspend(running, "middle", MIDDLE, 1, beneficiary="short", deadline_s=60)
    running.add("short", SHORT, deadline_s=10)
    ended = [name for _ in range(3) for name in running.step()]
    assert ended == ["short", "middle", "long"]
    assert running.answers == expected
    kinds = [type(notice) for notice in running.notices() if not isinstance(notice, Passed | Started)]
    assert kinds == [Stopped, Served, Stopped, Served, Resumed, Resumed]


def test_steps_are_as_short_as_they_must_be_to_stop_in_time(running):
    """A stopped step goes on as it was, also when shorter ones are wanted by then."""
    expected = alone(running, long=LONG)
    running.notices()
    running.add("long", LONG, stop_bound=chunks_of(256))
    running.stop_at(2)
    running.order_stop("short")
    assert running.step() == []
    running.add("short", SHORT, deadline_s=60, stop_bound=chunks_of(128))
    ended = [name for _ in range(6) for name in running.step()]
    assert ended == ["short", "long"]
    notices = running.notices()
    (stopped,) = [notice for notice in notices if isinstance(notice, Stopped)]
    assert stopped.tokens == 256
    undisturbed = [notice.tokens for notice in notices if isinstance(notice, Passed)]
    assert undisturbed[-4:] == [64, 128, 128, 128], "of the last one nothing is said yet: 60 remain"
    assert_same_output(running, expected)
    running.prefill("free", SHORT, stop_bound=StopBound(math.inf, ()))


def test_nobody_waits_for_what_was_expected_to_be_cached_of_another_and_is_not(running):
    """One shares a step for its last 60 tokens, and has all of 700 to compute."""
    expected = alone(running, long=LONG, short=SHORT)
    running.add("short", SHORT, deadline_s=60, stop_bound=chunks_of(256))
    running.add("long", LONG, extra_args={CACHED_XARG: 640})
    assert [running.step() for _ in range(3)] == [["short"], [], ["long"]]
    running.step()
    passed = [notice.tokens for notice in running.notices() if isinstance(notice, Passed)]
    assert passed[-3:] == [256, 256, 252]
    assert_same_output(running, expected)
    running.prefill("free", SHORT, stop_bound=StopBound(math.inf, ()))


def test_where_vllm_cuts_no_prompts_a_long_one_runs_whole(models):
    """However soon it must be able to stop."""
    with engine(models("llama"), enable_chunked_prefill=False) as running:
        expected = alone(running, long=LONG, short=SHORT)
        suspend(running, "long", LONG, 2, beneficiary="short", stop_bound=chunks_of(128))
        running.add("short", SHORT, deadline_s=60)
        assert [running.step() for _ in range(2)] == [["short"], ["long"]]
        assert running.answers == expected


def test_what_vllm_had_skipped_does_not_slip_into_an_urgent_step(running):
    """A request waits for its grammar outside the queue, where nobody orders it."""
    expected = alone(running, short=SHORT)
    too_long_to_join = random_prompt(2000, seed=4)
    grammar = StructuredOutputsParams(regex="[ab]{1,4}")
    running.add("with grammar", too_long_to_join, structured_outputs=grammar)
    assert len(running.scheduler.skipped_waiting) == 1
    (skipped,) = running.scheduler.skipped_waiting
    assert_soon(lambda: skipped.structured_output_request.grammar is not None, 20)
    running.add("short", SHORT, deadline_s=60)
    assert running.step() == ["short"]
    assert running.step() == ["with grammar"]
    assert_same_output(running, expected)


def test_a_runner_that_keeps_a_place_for_each_request_is_not_sent_more_than_it_has(running):
    """The suspended request loses its place, as it would its memory."""
    scheduler = running.scheduler
    scheduler._holds_slots, scheduler.max_num_running_reqs, slots = True, 1, scheduler.max_num_running_reqs
    try:
        suspend(running, "long", LONG, 2, beneficiary="short")
        running.add("short", SHORT, deadline_s=60)
        ended = [name for _ in range(8) for name in running.step()]
        assert ended == ["short", "long"]
    finally:
        scheduler._holds_slots, scheduler.max_num_running_reqs = False, slots


def test_one_that_finds_no_place_does_not_keep_the_one_that_has_it_from_going_on(running):
    """Nor may it take the place, as it weighs less."""
    scheduler = running.scheduler
    expected = alone(running, dear=LONG, cheap=SHORT)
    scheduler._holds_slots, scheduler.max_num_running_reqs, slots = True, 1, scheduler.max_num_running_reqs
    try:
        running.add("dear", LONG, deadline_s=60, weight=4.0, stop_bound=chunks_of(128))
        assert running.step() == []
        running.add("cheap", SHORT, deadline_s=30)
        ended = [name for _ in range(12) for name in running.step()]
        assert ended == ["dear", "cheap"]
        assert_same_output(running, expected)
        running.prefill("free", SHORT, stop_bound=StopBound(math.inf, ()))
    finally:
        scheduler._holds_slots, scheduler.max_num_running_reqs = False, slots


def test_jobs_enter_the_forecast_and_what_is_no_job_does_not(running):
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    stepper, memory_s = running.scheduler._stepper, 1e6
    rules, forecast = stepper.rules, Forecast(memory_s)
    stepper.rules = replace(rules, forecast=forecast)
    try:
        running.prefill("before", SHORT)
        before_s = forecast.at(0.0).load * memory_s
        running.llm.generate(
            TokensPrompt(prompt_token_ids=list(MIDDLE)), SamplingParams(max_tokens=1), use_tqdm=False
        )
        assert forecast.at(0.0).load * memory_s == before_s
        running.prefill("job", LONG, weight=4.0)
        assert forecast.at(0.0).load * memory_s - before_s == pytest.approx(0.008, rel=0.01)
    finally:
        stepper.rules = rules


def test_a_stopped_step_waits_for_its_beneficiary_to_arrive_but_not_for_long(running):
    expected = alone(running, long=LONG)
    suspend(running, "long", LONG, 2, beneficiary="never-comes")
    stopped_s = time.monotonic()
    assert running.step() == []
    running.finish()
    assert time.monotonic() - stopped_s >= 0.05
    assert running.answers == expected


def test_a_victim_does_not_go_on_before_its_beneficiary_is_served(running):
    suspend(running, "long", LONG, 2, beneficiary="short", deadline_s=5)
    running.add("short", SHORT)  # no deadline: by order alone the victim would go first
    assert running.step() == ["short"]
    assert running.step() == ["long"]


def test_a_stopped_step_is_not_the_step_before_the_next(running):
    """The scheduler's record of the previous step must not hold what has been rolled back."""
    suspend(running, "long", LONG, 2)
    assert not running.scheduler.prev_step_scheduled_req_ids
    assert [request.num_in_flight_tokens for request in running.scheduler.running] == [0]
    assert [request.num_computed_tokens for request in running.scheduler.running] == [0]


def test_victims_are_not_batched_with_their_beneficiary(running):
    suspend(running, "victim", SHORT, 2, beneficiary="urgent")
    running.add("urgent", MIDDLE, deadline_s=10)
    running.add("other", random_prompt(32, seed=5), deadline_s=10)
    assert sorted(running.step()) == ["other", "urgent"]
    assert running.step() == ["victim"]


def test_small_prompts_are_stopped_and_resumed_together(running):
    expected = alone(running, short=SHORT)
    running.add("short", SHORT)
    running.add("other", MIDDLE)
    running.stop_at(1, 3)
    assert running.step() == []
    assert running.step() == []
    assert sorted(running.step()) == ["other", "short"]
    assert running.answers["short"].tokens == expected["short"].tokens


def test_a_request_that_has_been_suspended_for_too_long_goes_first(running, monkeypatch):
    monkeypatch.setattr(running.scheduler._suspensions, "max_suspended_s", 0.2)
    suspend(running, "long", LONG, 2, beneficiary="short")
    time.sleep(0.25)
    running.add("short", SHORT, deadline_s=1)
    assert running.step() == ["long"]
    assert running.step() == ["short"]


def test_a_late_step_starts_over_when_its_place_is_wanted_for_those_on_time(running, monkeypatch):
    monkeypatch.setattr(running.scheduler._stepper, "_limits", Limits(max_suspended_steps=1))
    expected = alone(running, long=LONG)
    suspend(running, "long", LONG, 2, beneficiary="short", deadline_s=0)
    running.add("short", SHORT, deadline_s=10)
    assert "short" in running.step()
    assert set(running.rpc("checkpoints_held")) == {0}
    running.finish()
    assert_same_output(running, expected)
    dropped = [notice.jobs for notice in running.notices() if isinstance(notice, Dropped)]
    assert dropped == [("long",)]


def test_nothing_of_classes_stands_on_the_board_when_all_requests_are_alike(running):
    running.add("met", SHORT, deadline_s=60, tier="chat")
    running.step()
    assert running.board.view().targets is None
