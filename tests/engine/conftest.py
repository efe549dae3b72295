"""Engines that several tests share; each test leaves its engine at rest."""

import os

import pytest
from engines import engine

from benchmarks.engines.tiny_models import build_tiny
from prefill_node.engine_setup import EngineSetup

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


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


@pytest.fixture(scope="module")
def llama(models):
    with engine(models("llama")) as running:
        yield running


@pytest.fixture(scope="module")
def llama_tp2(models):
    with engine(models("llama"), tensor_parallel_size=2) as running:
        yield running


@pytest.fixture(scope="module")
def llama_chunked(models):
    with engine(models("llama"), max_num_batched_tokens=256) as running:
        yield running


@pytest.fixture(scope="module")
def llama_operator(models):
    with engine(models("llama"), setup=EngineSetup(mode="resume", granularity="operator")) as running:
        yield running


@pytest.fixture(scope="module")
def llama_operator_tp2(models):
    setup = EngineSetup(mode="resume", granularity="operator")
    with engine(models("llama"), tensor_parallel_size=2, setup=setup) as running:
        yield running


@pytest.fixture(scope="module")
def llama_sublayer(models):
    with engine(models("llama"), setup=EngineSetup(mode="resume", granularity="sublayer")) as running:
        yield running


@pytest.fixture(scope="module")
def llama_recompute(models):
    with engine(models("llama"), setup=EngineSetup(mode="recompute"), max_num_batched_tokens=256) as running:
        yield running
