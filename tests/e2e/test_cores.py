"""On CPU the tiers compute on cores of their own."""

import os

import psutil
import pytest

pytestmark = pytest.mark.e2e


def computing_cores(tier):
    """The cores of the thread that computes, of each worker of a tier."""
    replicas = [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"ServeReplica:slackserve:{tier}:" in " ".join(process.info["cmdline"] or [])
    ]
    return [
        set(process.cpu_affinity())
        for replica in replicas
        for process in replica.children(recursive=True)
        if "VLLM::Worker" in " ".join(process.cmdline())
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core the tiers share it")
def test_no_core_computes_for_both_tiers(deployment):
    [prefill], [decode] = computing_cores("Prefill"), computing_cores("Decode")
    assert prefill
    assert decode
    assert prefill.isdisjoint(decode)
