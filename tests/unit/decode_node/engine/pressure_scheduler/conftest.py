"""An engine with the scheduler under pressure, whose steps are taken one at a time."""

import pytest
from decode_steps import Stepped
from real_schedulers import build

from decode_node.engine.pressure_scheduler import PressureScheduler


@pytest.fixture
def stepped(tiny_model):
    def make(blocks, scheduler=PressureScheduler, **options):
        return Stepped(build(scheduler, tiny_model, blocks, **options))

    return make
