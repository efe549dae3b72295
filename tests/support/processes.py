"""The processes of a deployment's replicas."""

import psutil
import pytest

_NAMES = {"replica": "ServeReplica", "engine": "VLLM::EngineCore"}


def processes_of(tier):
    """The replica process of a tier and everything below it."""
    for process in psutil.process_iter(["cmdline"]):
        if f"ServeReplica:slackserve:{tier}" in " ".join(process.info["cmdline"] or []):
            return [process, *process.children(recursive=True)]
    pytest.fail(f"no {tier} replica")


def replicas():
    """The process ids of all replicas."""
    found = psutil.process_iter(["cmdline"])
    return {one.pid for one in found if "ServeReplica:slackserve:" in " ".join(one.info["cmdline"] or [])}


def of_kind(kind, processes):
    """Of a replica's processes: the replica itself, or its EngineCore, in which its one worker is."""
    return (process for process in processes if _NAMES[kind] in " ".join(process.cmdline()))
