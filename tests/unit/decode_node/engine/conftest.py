"""A tiny model's configuration; nothing is loaded."""

import os

import pytest

from benchmarks.harness.tiny_models import build_tiny_llama

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("llama"), layers=1)
