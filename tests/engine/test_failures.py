"""A step that fails is not a step that stops: the engine says which rank, which step, and ends."""

import pytest
from engines import engine, random_prompt

from prefill_node.engine_setup import EngineSetup
from prefill_node.step_order import PreemptedOutput

PROMPT = random_prompt(300, seed=1)


def error_of(running):
    with pytest.raises(Exception, match=r".") as caught:
        running.step()
    return str(caught.value)


def test_an_exception_in_a_layer_is_a_crash(models):
    with engine(models("llama")) as running:
        outputs = []
        take = running.scheduler.update_from_output
        running.scheduler.update_from_output = lambda *args: outputs.append(args[1]) or take(*args)
        running.add("doomed", PROMPT)
        running.rpc("fail_at", 2)
        assert "a layer failed" in error_of(running)
        assert not any(isinstance(output, PreemptedOutput) for output in outputs)


def test_a_rank_that_stays_away_from_a_vote_fails_the_engine_by_name(models):
    """Not in the first pass of its size, in which it may compile a kernel."""
    setup = EngineSetup(mode="resume", vote_timeout_s=1.0)
    with engine(models("llama"), tensor_parallel_size=2, setup=setup) as running:
        running.rpc("stay_away", 1, 2, 2.0)
        assert running.prefill("first", PROMPT).tokens
        running.forget()
        running.add("doomed", PROMPT)
        running.rpc("stay_away", 1, 2, 5.0)
        error = error_of(running)
        assert "rank 1" in error
        assert f"step {running.scheduler._stepper.step_id}" in error
