"""The engine's requests as the decision rules see them, without an engine."""

from types import SimpleNamespace

import pytest

from prefill_node.engine.queue import QueueView
from prefill_node.engine.stepping.memory import Memory
from prefill_node.engine.stepping.step_choice import ChoiceRules, Start
from prefill_node.engine.stepping.stepper import Stepper
from simulator.replica.job import Job
from simulator.workload.arrivals import Arrival
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import Limits
from slo.queue.order import QueueOrder
from slo.tiers import STANDARD

MISSING, FREE = 500, 1


class CountingMemory:
    """Of everybody's prompt others hold all but one block."""

    def __init__(self):
        self.asked = 0

    def blocks_of(self, request):
        return 0, MISSING

    def shared_blocks_of(self, request, missing):
        self.asked += 1
        return missing - 1


@pytest.fixture
def scheduler():
    jobs = [Job(Arrival(n, 0.0, "kind", 8000, 1, None, STANDARD), 1.0, 90.0 + n) for n in range(500)]
    requests = {job.request_id: job for job in jobs}
    return SimpleNamespace(
        running=[], waiting=jobs, requests=requests, kv_cache_manager=CountingMemory(), max_num_running_reqs=9
    )


def test_with_memory_short_few_are_asked_what_they_share(scheduler):
    """It takes a look-up for each block of the prefix."""
    rules = ChoiceRules(QueueOrder.SEDF, PrefillPredictor(1e-6, 0.0), 8192)
    stepper = Stepper(rules, Limits())
    view = QueueView(scheduler, stepper)
    queue = view.queued()
    command = stepper.next_step(queue, [], FREE, 0.0, memory=Memory(shared_blocks=view.shared_blocks))
    assert isinstance(command, Start)
    assert command.requests == (scheduler.waiting[0].request_id,)
    assert 1 <= scheduler.kv_cache_manager.asked <= 3
