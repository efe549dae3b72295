"""How an engine is started; that it serves so is `tests/e2e`'s."""

import os
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm import envs

from kv_transfer.engine import ReplicaEngine


@pytest.fixture
def started(monkeypatch):
    """What Ray's engine class is asked to start: (executor, OpenMP's variables) of each."""
    seen = []

    def start(self, args, config, placement_group):
        openmp = {
            name: value for name, value in os.environ.items() if name.startswith(("OMP", "GOMP", "KMP"))
        }
        seen.append((config.parallel_config.distributed_executor_backend, openmp))
        return "client"

    monkeypatch.setattr(VLLMEngine, "_start_async_llm_engine", start)
    envs.disable_envs_cache()  # an engine of another test in this process has read them
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1")
    for name in ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    return seen


def config(ranks):
    parallel = SimpleNamespace(
        world_size=ranks,
        local_world_size=ranks,
        data_parallel_rank_local=None,
        _api_process_count=1,
        distributed_executor_backend="mp",
    )
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=object())


def start(ranks):
    return object.__new__(ReplicaEngine)._start_async_llm_engine(None, config(ranks), None)


def test_one_rank_is_one_process_which_begins_with_its_cores(started):
    before = dict(os.environ)
    assert start(1) == "client"
    [(executor, openmp)] = started
    assert executor == "uni"
    assert openmp["OMP_NUM_THREADS"] == "1"
    assert "1" in openmp["OMP_PLACES"]
    assert dict(os.environ) == before


def test_several_ranks_are_started_as_vllm_does(started):
    start(2)
    [(executor, openmp)] = started
    assert executor == "mp"
    assert "OMP_PLACES" not in openmp
