"""What a stream holds is counted by its length, so that it may give back nothing before it ends."""

import pytest
from decode_steps import Stepped
from pressure_steps import expects, knows_steps
from real_schedulers import Clock, build

from decode_node.engine.pressure_scheduler import PressureScheduler

pytestmark = pytest.mark.slow
LONGEST = 2048


def test_a_model_whose_streams_give_back_what_their_window_has_passed_is_refused_with_a_remedy(tiny_model):
    with pytest.raises(ValueError, match=rf"leave pressure.enabled off, or set max_model_len \({LONGEST}\)"):
        build(PressureScheduler, tiny_model, 60, window=64, one_window=True)


def test_a_window_that_no_stream_is_longer_than_is_none(tiny_model, monkeypatch):
    monkeypatch.setattr("decode_node.engine.pressure_scheduler.time", Clock())
    steps = []
    for window in ({}, {"window": LONGEST, "one_window": True}):
        engine = Stepped(build(PressureScheduler, tiny_model, 60, **window))
        knows_steps(engine)
        expects(engine, 400)
        for number in range(6):
            engine.add(f"r{number}", 65, 400)
        engine.finish()
        steps.append([output.num_scheduled_tokens for output in engine.outputs])
    assert steps[0] == steps[1]
