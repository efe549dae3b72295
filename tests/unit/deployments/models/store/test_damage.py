"""A damaged model is converted again."""

import json
import logging
import os
from pathlib import Path

import pytest
from small_store import WEIGHTS, FakeConverter, model_entries

from deployments.models.embedded import EMBEDDED_MODEL_ID
from deployments.models.store import MARKER_NAME, ModelStore


class TestDamage:
    @pytest.fixture
    def weights(self, store: ModelStore) -> Path:
        return store.ensure_embedded() / "model.safetensors"

    def assert_mended(self, store: ModelStore, converter: FakeConverter, weights: Path) -> None:
        store.ensure_embedded()
        assert converter.call_count == 2
        assert weights.read_bytes() == WEIGHTS
        assert model_entries(weights.parent.parent) == [EMBEDDED_MODEL_ID]

    def test_a_truncated_file(
        self, store: ModelStore, converter: FakeConverter, weights: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        os.truncate(weights, 10)

        with caplog.at_level(logging.WARNING):
            self.assert_mended(store, converter, weights)

        assert "model.safetensors has 10 bytes, not 7000" in caplog.text

    def test_a_missing_file(self, store: ModelStore, converter: FakeConverter, weights: Path) -> None:
        weights.unlink()

        self.assert_mended(store, converter, weights)

    @pytest.mark.parametrize("content", [b"", b"{", b'{"format_version": 1}', b'{"format_version": "1"}'])
    def test_a_damaged_marker(
        self, store: ModelStore, converter: FakeConverter, weights: Path, content: bytes
    ) -> None:
        (weights.parent / MARKER_NAME).write_bytes(content)

        self.assert_mended(store, converter, weights)

    def test_no_marker(self, store: ModelStore, converter: FakeConverter, weights: Path) -> None:
        (weights.parent / MARKER_NAME).unlink()

        self.assert_mended(store, converter, weights)

    def test_another_format(self, store: ModelStore, converter: FakeConverter, weights: Path) -> None:
        path = weights.parent / MARKER_NAME
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format_version": 0}))

        self.assert_mended(store, converter, weights)

    def test_a_file_in_the_place_of_the_directory(
        self, store: ModelStore, converter: FakeConverter, root: Path
    ) -> None:
        root.mkdir(parents=True)
        (root / EMBEDDED_MODEL_ID).write_text("not a directory")

        assert store.ensure_embedded().is_dir()
        assert converter.call_count == 1
        assert model_entries(root) == [EMBEDDED_MODEL_ID]

    def test_a_touched_file_is_kept(self, store: ModelStore, converter: FakeConverter, weights: Path) -> None:
        os.utime(weights, ns=(1, 1))

        store.ensure_embedded()

        assert converter.call_count == 1

    def test_files_of_others_are_left_alone(
        self, store: ModelStore, converter: FakeConverter, weights: Path
    ) -> None:
        (weights.parent / "notes.txt").write_text("mine")

        store.ensure_embedded()

        assert converter.call_count == 1
