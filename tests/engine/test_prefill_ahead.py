"""Prefill that is never stopped, with steps composed while one runs: as vLLM does it on a GPU."""

import pytest
from engines import engine, random_prompt
from steps_ahead import steps_ahead_on_cpu

from prefill_node.engine_setup import EngineSetup
from prefill_node.replica.engine import ASYNC_SCHEDULER, SCHEDULER

PROMPTS = {f"prompt-{number}": random_prompt(90 * number + 40, seed=number) for number in range(1, 9)}
CHUNK = 256


@pytest.fixture(scope="module")
def start(models):
    """Starts an engine without preemption, whose steps are composed ahead or not."""

    def start_one(scheduler, **options):
        return engine(
            models("llama"),
            setup=EngineSetup(mode="off", join_tokens=200),
            worker="prefill_node.worker.cpu.PreemptibleCPUWorker",
            scheduler_cls=scheduler,
            max_num_batched_tokens=CHUNK,
            **options,
        )

    return start_one


def served(running, prompts=PROMPTS):
    """All at once, the last the most urgent: the names in the order in which they ended, steps in flight."""
    in_flight = []
    stepper = running.scheduler._stepper
    issued = stepper.step_issued

    def noted(*arguments):
        view = issued(*arguments)
        in_flight.append(len(stepper._issued))
        return view

    stepper.step_issued = noted
    for number, (name, prompt) in enumerate(prompts.items()):
        running.add(name, prompt, deadline_s=600 - number)
    ended = []
    while running.llm.llm_engine.has_unfinished_requests():
        ended += running.step()
    running.llm.llm_engine.step()
    return ended, max(in_flight)


@pytest.fixture(scope="module")
def expected(start):
    with start(SCHEDULER) as running:
        ended, in_flight = served(running)
        assert in_flight == 1
        return ended, {name: (answer.tokens, answer.logprobs) for name, answer in running.answers.items()}


def outputs(running):
    return {name: (answer.tokens, answer.logprobs) for name, answer in running.answers.items()}


def test_with_little_memory_each_ends_as_well(start, expected):
    """The first test here: its engine ends before the one that the others share is started."""
    with (
        steps_ahead_on_cpu(),
        start(ASYNC_SCHEDULER, num_gpu_blocks_override=10, max_model_len=1024) as running,
    ):
        ended, _ = served(running)
        assert sorted(ended) == sorted(PROMPTS)
        assert outputs(running) == expected[1]
        assert_at_rest(running)


@pytest.fixture(scope="module")
def shared_ahead(start, expected):
    with steps_ahead_on_cpu(), start(ASYNC_SCHEDULER) as running:
        yield running


@pytest.fixture
def ahead(shared_ahead):
    """An engine that composes steps ahead, with an empty prefix cache."""
    assert shared_ahead.llm.reset_prefix_cache()
    shared_ahead.answers.clear()
    return shared_ahead


def test_a_step_is_composed_while_one_runs_and_every_answer_is_what_it_was(ahead, expected):
    ended, in_flight = served(ahead)
    assert in_flight == 2
    assert ended == expected[0], "and they run in the same order"
    assert outputs(ahead) == expected[1]
    assert_at_rest(ahead)
    again, _ = served(ahead)
    assert sorted(again) == sorted(PROMPTS)
    for name, (tokens, logprobs) in outputs(ahead).items():  # from the cache: others share the last steps
        expected_tokens, expected_logprobs = expected[1][name]
        assert tokens == expected_tokens
        assert dict(logprobs) == pytest.approx(dict(expected_logprobs), abs=1e-5), "but for the last bits"
    assert max(ahead.cached_tokens.values()) > CHUNK


def test_behind_a_long_step_nothing_is_composed_ahead(ahead, expected, monkeypatch):
    monkeypatch.setattr("prefill_node.engine.stepping.stepper.COMPOSED_AHEAD_S", 1e-9)
    ended, in_flight = served(ahead)
    assert (in_flight, ended) == (1, expected[0])
    assert outputs(ahead) == expected[1]


def test_one_that_leaves_while_its_step_runs_leaves_nothing_behind(ahead):
    for name, prompt in PROMPTS.items():
        ahead.add(name, prompt)
    ahead.step()
    ahead.abort(*list(PROMPTS)[:5])
    ahead.finish()
    assert_at_rest(ahead)


def assert_at_rest(running):
    for _ in range(3):
        running.llm.llm_engine.step()
    scheduler = running.scheduler
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler._stepper._issued
    assert scheduler.kv_cache_manager.usage == 0.0
    assert running.board.view().step is None
