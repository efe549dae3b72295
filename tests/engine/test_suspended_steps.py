"""What becomes of suspended steps: order, aborts, memory, pauses. Everything ends, and ends right.

Their checkpoints lie in KV blocks that their own step has not filled yet.
"""

import math
import time
from dataclasses import replace

import pytest
from engines import engine, random_prompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from waiting import assert_soon

from prefill_node.board.events import Dropped, Passed, Resumed, Served, Started, Stopped
from slo.predict.pass_shape import PassPart
from slo.predict.prefill_time import PrefillPredictor, attention_pairs
from slo.preemption.types import Limits
from slo.queue.arrival_forecast import Forecast
from slo.queue.chunks import StopBound
from slo.request import CACHED_XARG, PREDICTOR_XARG

LONG = random_prompt(700, seed=1)
MIDDLE = random_prompt(500, seed=2)
SHORT = random_prompt(64, seed=3)
FOUR_BLOCKS = random_prompt(512, seed=4)
WHOLE = 2 * 128 * 4
"""Bytes of a checkpoint for each token: hidden states and residual, 128 wide, in float32."""
LAYERS = 4


def pytest_generate_tests(metafunc):
    if "running" in metafunc.fixturenames:
        metafunc.parametrize("shared_engine", ["llama", "llama_tp2"], indirect=True)
    if "small" in metafunc.fixturenames:
        metafunc.parametrize("shared_engine", ["llama_small_memory"], indirect=True)


def alone(running, **prompts):
    """What each prompt gives when nothing disturbs it."""
    expected = {}
    for name, prompt in prompts.items():
        expected[name] = running.prefill(name, prompt)
        running.forget()
    return expected


def assert_same_output(running, expected):
    """Tokens and log-probabilities only: KV blocks that were used before hold leftovers behind the prompt."""
    for name, answer in expected.items():
        assert (running.answers[name].tokens, running.answers[name].logprobs) == (
            answer.tokens,
            answer.logprobs,
        )


def suspend(running, name, prompt, boundary, beneficiary="", **options):
    """Start a prefill and stop it."""
    running.add(name, prompt, **options)
    running.stop_at(boundary)
    running.order_stop(beneficiary)
    assert running.step() == []
    assert running.rpc("stops_left")[0] == 0


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


def chunks_of(tokens):
    """A bound that is met by so many, as the engine's predictor has it."""
    return StopBound(1e-3 + 1e-5 * (tokens + 1), (PassPart(1.0, 0.0),))


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


def test_blocks_of_an_unfinished_step_are_never_shared(running):
    prefix, tail = LONG[:512], random_prompt(100, seed=9)
    expected = alone(running, twin=prefix + tail)
    suspend(running, "long", LONG, 2, beneficiary="twin")
    running.add("twin", prefix + tail, deadline_s=10)
    assert running.step() == ["twin"]
    assert running.cached_tokens["twin"] == 0
    running.finish()
    assert running.answers["twin"] == expected["twin"]
    running.prefill("again", prefix + tail)
    assert running.cached_tokens["again"] == 512
    started = [notice for notice in running.notices() if isinstance(notice, Started)]
    assert [(each.job, each.cached_tokens) for each in started] == [("long", 0), ("twin", 0), ("again", 512)]
    assert [each.issued_s for each in started] == sorted(each.issued_s for each in started)


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


@pytest.mark.parametrize("boundary", range(1, LAYERS))
def test_a_suspended_step_takes_only_memory_for_which_the_layers_ahead_have_no_room(running, boundary):
    expected = alone(running, long=FOUR_BLOCKS)
    of_layer = 2 * 2 * 32 * 4 / len(running.rpc("kept_bytes"))
    """Bytes of its KV cache for each token: keys and values, two heads of 32, each rank has its part."""
    room = of_layer * (LAYERS - boundary)
    for each in running.rpc("kept_bytes"):
        assert each[0] == 0, "there it starts over"
        assert each[1:] == tuple(max(0, WHOLE - of_layer * (LAYERS - layer)) for layer in range(1, LAYERS))
    assert running.kept_bytes("long", FOUR_BLOCKS, boundary) == max(0, WHOLE - room) * len(FOUR_BLOCKS)
    running.finish()
    assert running.answers == expected


def test_a_prompt_shorter_than_a_block_keeps_its_checkpoint_as_it_was(running):
    assert running.kept_bytes("short", SHORT, 1) == WHOLE * len(SHORT)


def test_others_run_and_come_and_go_while_a_checkpoint_lies_there(running):
    """They take the blocks that are free, and leave in them what they like."""
    expected = alone(running, long=FOUR_BLOCKS)
    running.kept_bytes("long", FOUR_BLOCKS, 2, deadline_s=300)
    for number in range(12):
        other = random_prompt(700, seed=10 + number)
        running.kept_bytes(f"other-{number}", other, 1 + number % 3, deadline_s=200 - 10 * number)
        if number % 3 == 0:
            running.abort(f"other-{number}")
    running.finish()
    assert_same_output(running, expected)


def test_a_member_that_leaves_takes_its_rows_with_it(running):
    """Its blocks are another request's by the time that the rest goes on."""
    first, second = random_prompt(300, seed=3), random_prompt(400, seed=4)
    expected = alone(running, second=second)
    running.add("first", first)
    running.add("second", second)
    running.stop_at(2)
    assert running.step() == []
    running.abort("first")
    for number in range(2):  # the blocks that were freed last are the next to be taken
        running.prefill(f"other-{number}", random_prompt(1900, seed=20 + number), deadline_s=1)
    running.finish()
    assert_same_output(running, expected)


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


@pytest.fixture
def small(shared_engine):
    """An engine with room for eleven blocks of 128 tokens, at rest before and after."""
    shared_engine.forget()
    yield shared_engine
    shared_engine.finish()
    shared_engine.check_at_rest()


def test_an_urgent_request_takes_the_memory_of_a_suspended_one(small):
    expected = alone(small, long=LONG, urgent=LONG[::-1])
    suspend(small, "long", LONG, 2, beneficiary="urgent")
    small.add("urgent", LONG[::-1], deadline_s=10)
    assert small.step() == ["urgent"]
    assert small.rpc("checkpoints_held") == [0]
    small.finish()
    assert_same_output(small, expected)
    said = [each for each in small.notices() if isinstance(each, Started | Dropped)]
    assert [
        (each.jobs, each.reason) if isinstance(each, Dropped) else (each.job, each.is_first) for each in said
    ] == [("long", True), (("long",), "memory"), ("urgent", True), ("long", False)]


def test_a_prompt_between_two_chunks_that_loses_its_memory_is_reported(small):
    """What it had computed is done again."""
    urgent = random_prompt(900, seed=4)
    expected = alone(small, long=LONG, urgent=urgent)
    small.prefill("before", LONG[:200])
    small.add("long", LONG, deadline_s=600, stop_bound=chunks_of(512))
    assert small.step() == []
    slow = PrefillPredictor(0.1, 0.0)  # 90 s for the urgent one, which has no 19 s for the end of the other
    arguments = {PREDICTOR_XARG: slow.encode()}
    unbound = StopBound(math.inf, ())
    small.add("urgent", urgent, deadline_s=95, weight=2.0, stop_bound=unbound, extra_args=arguments)
    assert small.step() == ["urgent"]
    small.finish()
    assert_same_output(small, expected)
    said = [each for each in small.notices() if isinstance(each, Started | Dropped)]
    assert [type(each) for each in said] == [Started, Started, Dropped, Started, Started]
    _, started, dropped, *_ = said
    assert (started.job, started.cached_tokens) == ("long", 128)
    assert (dropped.jobs, dropped.reason, dropped.done) == (("long",), "memory", 1.0)
    assert (dropped.tokens, dropped.pairs) == (512, attention_pairs(512, 128))


def test_a_request_with_time_to_spare_waits_for_the_memory_of_a_prompt_between_two_chunks(small):
    small.add("long", LONG, deadline_s=60, stop_bound=chunks_of(512))
    assert small.step() == []
    patient = random_prompt(900, seed=4)
    small.add("patient", patient, deadline_s=10, weight=2.0, stop_bound=StopBound(math.inf, ()))
    assert small.step() == ["long"]
    assert small.step() == ["patient"]
    assert not any(isinstance(notice, Dropped) for notice in small.notices())


def test_a_prompt_that_loses_its_memory_within_a_later_chunk_has_lost_the_earlier_ones_too(small):
    urgent = random_prompt(900, seed=4)
    small.notices()
    small.add("long", LONG, deadline_s=60, stop_bound=chunks_of(512))
    assert small.step() == []
    small.stop_at(2)
    small.order_stop("urgent")
    assert small.step() == []
    small.add("urgent", urgent, deadline_s=10, weight=2.0, stop_bound=StopBound(math.inf, ()))
    assert small.step() == ["urgent"]
    small.finish()
    (dropped,) = [notice for notice in small.notices() if isinstance(notice, Dropped)]
    assert (dropped.jobs, dropped.reason) == (("long",), "memory")
    assert 0 < dropped.done < 1
    assert (dropped.tokens, dropped.pairs) == (188, attention_pairs(188, 512))
    assert (dropped.earlier_tokens, dropped.earlier_pairs) == (512, attention_pairs(512, 0))


def test_a_less_valuable_request_waits_for_the_memory_of_a_suspended_one(small):
    suspend(small, "long", LONG, 2, beneficiary="cheap", weight=4.0)
    small.add("cheap", LONG[::-1], deadline_s=10, weight=1.0)
    assert small.step() == ["long"]
    assert small.step() == ["cheap"]


def test_a_request_with_time_to_spare_waits_for_the_memory_of_a_suspended_one(small):
    suspend(small, "long", LONG, 2)
    small.add("patient", LONG[::-1], deadline_s=60)
    assert small.step() == ["long"]
    assert small.step() == ["patient"]


def test_a_request_takes_no_memory_for_the_prefix_that_a_suspended_one_holds(small):
    """Both have seven blocks, the same four first: three more are enough."""
    prefix, tail = LONG[:512], random_prompt(300, seed=8)
    small.prefill("before", prefix + SHORT)
    suspend(small, "long", prefix + tail, 2, beneficiary="urgent")
    small.add("urgent", prefix + tail[::-1], deadline_s=10)
    assert small.step() == ["urgent"]
    assert small.step() == ["long"]
    assert [small.cached_tokens[name] for name in ("long", "urgent")] == [512, 512]
    assert not any(isinstance(notice, Dropped) for notice in small.notices())


def test_the_least_valuable_checkpoint_goes_first(small):
    suspend(small, "dear", SHORT, 2, beneficiary="urgent", weight=3.0)
    suspend(small, "cheap", MIDDLE, 2, beneficiary="urgent", weight=1.0, deadline_s=60)
    small.add("urgent", random_prompt(900, seed=4), deadline_s=10, weight=4.0)
    assert small.step() == ["urgent"]
    dropped = [notice.jobs for notice in small.notices() if isinstance(notice, Dropped)]
    assert dropped == [("cheap",)]
