"""Where each token of an image attends to all of it, no chunk of ours parts one."""

import time

import pytest
from decode_steps import Stepped
from pressure_steps import LOW, TOP, expects, knows_steps
from real_schedulers import build

from decode_node.engine.pressure_scheduler import PressureScheduler
from decode_node.scheduler import AsyncCarryingScheduler, CarryingScheduler

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scheduler", [CarryingScheduler, AsyncCarryingScheduler, PressureScheduler])
@pytest.mark.parametrize(("whole_images", "tokens"), [(True, 300), (False, 64)])
def test_a_step_takes_as_much_of_such_a_models_prompt_as_it_has_room_for(
    tiny_model, scheduler, whole_images, tokens
):
    engine = Stepped(build(scheduler, tiny_model, 100, chunk=64, whole_images=whole_images))
    engine.add("one", 300, 2)
    assert engine.step().num_scheduled_tokens == {"one": tokens}


def test_it_is_computed_again_in_one_piece_too_whatever_pace_is_to_be_kept(tiny_model):
    engine = Stepped(build(PressureScheduler, tiny_model, 200, chunk=256, whole_images=True))
    knows_steps(engine, prompt_s=0.001)
    expects(engine, 1)
    engine.add("top", 16, 100, tier=TOP, tpot_s=0.064)
    request = engine.add("one", 300, 20, tier=LOW)
    for _ in range(4):
        engine.step()
    request.skip_reading_prefix_cache = True
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, time.monotonic())
    seen = len(engine.outputs)
    engine.finish()
    tokens = [output.num_scheduled_tokens.get("one", 0) for output in engine.outputs[seen:]]
    assert sum(more > 1 for more in tokens) == 1
