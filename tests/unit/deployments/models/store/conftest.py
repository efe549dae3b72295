"""A model store over a small source, with a converter that counts its calls."""

from pathlib import Path

import pytest
from small_store import SOURCE_BYTES, WEIGHTS, FakeConverter

from deployments.models.embedded import EmbeddedSource
from deployments.models.store import ModelStore


@pytest.fixture
def source(tmp_path: Path) -> EmbeddedSource:
    path = tmp_path / "source.gguf"
    path.write_bytes(SOURCE_BYTES)
    return EmbeddedSource(path, "one wheel's", converted_bytes=len(WEIGHTS))


@pytest.fixture
def converter() -> FakeConverter:
    return FakeConverter()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture
def store(root: Path, source: EmbeddedSource, converter: FakeConverter) -> ModelStore:
    return ModelStore(root, converter=converter, find_source=lambda: source)
