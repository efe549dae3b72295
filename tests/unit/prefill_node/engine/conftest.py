"""A model whose scheduler is stepped without it."""

import pytest

from benchmarks.harness.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("llama"), layers=1)
