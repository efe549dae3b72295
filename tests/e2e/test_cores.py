"""On CPU the tiers compute on cores of their own, and keep the memory that a pass needs."""

import os

import pytest
from processes import of_kind, processes_of

from deployments.local.engine_start import allocator_environment

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core the tiers share it")
def test_no_core_computes_for_both_tiers(deployment):
    [prefill], [decode] = [
        [set(worker.cpu_affinity()) for worker in of_kind("worker", processes_of(tier))]
        for tier in ("Prefill", "Decode")
    ]
    assert prefill
    assert decode
    assert prefill.isdisjoint(decode)


def test_engines_keep_freed_memory(deployment):
    [worker] = of_kind("worker", processes_of("Prefill"))
    environment = worker.environ()
    assert {name: environment.get(name) for name in allocator_environment()} == allocator_environment()
