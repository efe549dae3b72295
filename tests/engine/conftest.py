"""Engines that several tests share, one start of each; each test leaves its engine at rest."""

import asyncio
import os

import pytest
from engines import COMPILED, engine

from benchmarks.harness.tiny_models import build_tiny
from prefill_node.engine_setup import EngineSetup

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",  # vLLM compiles without C++, in seconds; the pieces are the same
}


@pytest.fixture(scope="module")
def loop():
    """Runs what a test awaits; the engines of its module live in it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directories of tiny random models, built on first use."""
    built = {}

    def directory(architecture, **sizes):
        key = (architecture, *sorted(sizes.items()))
        if key not in built:
            built[key] = build_tiny(tmp_path_factory.mktemp(architecture), architecture, **sizes)
        return built[key]

    return directory


IS_SECOND = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Whether this is one of the runs of `test_second_runner.py`."""
RUNNER = "vllm.v1.worker." + ("cpu.model_runner" if IS_SECOND else "cpu_model_runner")

ENGINES = {
    "llama": {},
    "llama_tp2": {"tensor_parallel_size": 2},
    "llama_chunked": {"max_num_batched_tokens": 256},
    "llama_operator": {"setup": EngineSetup(mode="resume", granularity="operator")},
    "llama_bfloat16": {"setup": EngineSetup(mode="resume", granularity="operator"), "dtype": "bfloat16"},
    "llama_operator_tp2": {
        "setup": EngineSetup(mode="resume", granularity="operator"),
        "tensor_parallel_size": 2,
    },
    "llama_compiled": COMPILED,
    "llama_compiled_tp2": COMPILED | {"tensor_parallel_size": 2},
    "llama_compiled_layer": {
        "setup": EngineSetup(mode="resume", compiled=True),
        "enforce_eager": False,
        "max_num_batched_tokens": 256,
    },
    "llama_lora": {
        "setup": EngineSetup(mode="resume", granularity="operator"),
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
    },
    "llama_lora_tp2": {
        "setup": EngineSetup(mode="resume", granularity="operator"),
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "tensor_parallel_size": 2,
    },
    "llama_sublayer": {"setup": EngineSetup(mode="resume", granularity="sublayer")},
    "llama_recompute": {"setup": EngineSetup(mode="recompute"), "max_num_batched_tokens": 256},
    # Room for eleven blocks of 128 tokens.
    "llama_small_memory": {"max_model_len": 1024, "num_gpu_blocks_override": 12},
}


@pytest.fixture(scope="module")
def shared_engine(request, models):
    """One of `ENGINES`, as the test's parameter names it; pytest runs the tests on one engine together."""
    with engine(models("llama"), **ENGINES[request.param]) as running:
        assert {*running.rpc("runner")} == {RUNNER}
        yield running


@pytest.fixture
def running(shared_engine):
    """An engine at rest, with empty prefix cache, before and after."""
    shared_engine.forget()
    yield shared_engine
    shared_engine.finish()
    shared_engine.check_at_rest()
