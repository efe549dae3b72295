"""On CPU the tiers compute on cores of their own, and keep the memory that a pass needs."""

import os
import time

import pytest
from processes import of_kind, processes_of

from deployments.engines.environment import allocator_environment

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core the tiers share it")
def test_no_core_computes_for_both_tiers(deployment):
    [prefill], [decode] = [
        [set(engine.cpu_affinity()) for engine in of_kind("engine", processes_of(tier))]
        for tier in ("Prefill", "Decode")
    ]
    assert prefill
    assert decode
    assert prefill.isdisjoint(decode)


def test_engines_keep_freed_memory(deployment):
    [engine] = of_kind("engine", processes_of("Prefill"))
    environment = engine.environ()
    assert {name: environment.get(name) for name in allocator_environment()} == allocator_environment()


def test_idle_engines_keep_no_core_busy(deployment):
    """NIXL's progress threads, as its Python API makes them, keep one for each engine."""

    def seconds():
        engines = [each for tier in ("Prefill", "Decode") for each in processes_of(tier)[1:]]
        return sum(each.cpu_times().user + each.cpu_times().system for each in engines)

    time.sleep(1.5)  # vLLM's own waits spin for a second after the last work
    before_s = seconds()
    time.sleep(3.0)
    assert seconds() - before_s < 0.3 * 3.0
