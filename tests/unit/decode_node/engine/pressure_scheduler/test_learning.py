"""Lengths of answers and times of steps are learned."""

import pytest
from pressure_steps import MIDDLE
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import RequestStatus

from slo.decode.step_time import StepShape
from slo.request import SEARCH_STEP_XARG

pytestmark = pytest.mark.slow


def test_lengths_are_learned_from_answers_that_end_by_themselves(stepped):
    engine = stepped(200)
    for number in range(30):
        engine.add(f"r{number}", 10, 12, tenant="t")
    engine.add("aborted", 10, 500, tenant="t")
    for _ in range(5):
        engine.step()
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    engine.finish()
    engine.scheduler._lengths.factor = 1.0
    assert engine.scheduler._lengths.remaining(MIDDLE, "t", 0, 10**6) == 12


def test_a_step_of_a_search_teaches_no_length(stepped):
    engine = stepped(200)
    for number in range(30):
        engine.add(f"r{number}", 10, 12, tenant="t")
        engine.add(f"step{number}", 10, 1, tenant="t", **{SEARCH_STEP_XARG: number > 0})
    engine.finish()
    engine.scheduler._lengths.factor = 1.0
    assert engine.scheduler._lengths.remaining(MIDDLE, "t", 0, 10**6) == 12


@pytest.mark.parametrize(("stop", "learned"), [(["."], 7), ([], 256)])
def test_lengths_are_learned_from_answers_that_end_with_a_stop_string(stepped, stop, learned):
    engine = stepped(500)
    for number in range(30):
        engine.add(f"r{number}", 10, 500, tenant="t").sampling_params.stop = stop
    engine.add("unborn", 10, 500, tenant="t").sampling_params.stop = stop
    engine.scheduler.finish_requests("unborn", RequestStatus.FINISHED_ABORTED)
    for _ in range(7):
        engine.step()
    for number in range(30):  # as the client's process ends one in whose text it has found the string
        engine.scheduler.finish_requests(f"r{number}", RequestStatus.FINISHED_ABORTED)
    engine.scheduler._lengths.factor = 1.0
    assert engine.scheduler._lengths.remaining(MIDDLE, "t", 0, 10**6) == learned


def test_lengths_are_learned_from_answers_that_end_because_they_repeat_themselves(stepped, monkeypatch):
    repeats = "vllm.v1.core.sched.utils.check_sequence_repetition"
    monkeypatch.setattr(repeats, lambda tokens, params: len(tokens) == params.min_count)
    engine = stepped(500)
    for number in range(30):
        request = engine.add(f"r{number}", 10, 500, tenant="t")
        request.sampling_params.repetition_detection = RepetitionDetectionParams(1, 1, 9)
    engine.finish()
    assert set(engine.why.values()) == {"repetition_detected"}
    engine.scheduler._lengths.factor = 1.0
    assert engine.scheduler._lengths.remaining(MIDDLE, "t", 0, 10**6) == 9


def test_steps_are_measured(stepped):
    engine = stepped(200)
    engine.add("a", 10, 60)
    engine.finish()
    assert engine.scheduler._times.is_known
    assert engine.scheduler._times.predict_s(StepShape(1, 30)) > 0
