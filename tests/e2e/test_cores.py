"""On CPU the tiers compute on cores of their own, and keep the memory that a pass needs."""

import os

import psutil
import pytest

from deployments.cpu_memory import allocator_environment

pytestmark = pytest.mark.e2e


def workers(tier):
    """The workers of a tier's engines."""
    replicas = [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"ServeReplica:slackserve:{tier}:" in " ".join(process.info["cmdline"] or [])
    ]
    return [
        process
        for replica in replicas
        for process in replica.children(recursive=True)
        if "VLLM::Worker" in " ".join(process.cmdline())
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core the tiers share it")
def test_no_core_computes_for_both_tiers(deployment):
    [prefill], [decode] = [
        [set(worker.cpu_affinity()) for worker in workers(tier)] for tier in ("Prefill", "Decode")
    ]
    assert prefill
    assert decode
    assert prefill.isdisjoint(decode)


def test_engines_keep_freed_memory(deployment):
    [worker] = workers("Prefill")
    environment = worker.environ()
    assert {name: environment.get(name) for name in allocator_environment()} == allocator_environment()
