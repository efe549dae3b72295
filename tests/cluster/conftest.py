"""What several tests of clusters begin with: hosts of their own, and a model for long streams."""

import pytest
from namespaces import Network

from benchmarks.harness.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def network():
    with Network() as network:
        yield network


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", context=16_384)
