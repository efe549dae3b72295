"""The embedded model is converted once, whole or not at all."""

import errno
import os
from pathlib import Path

import pytest
from small_store import FakeConverter, Steps, model_entries

from deployments.models.conversion import ProgressCallback
from deployments.models.embedded import (
    EMBEDDED_MODEL_ID,
    ConversionFailedError,
    EmbeddedModelMissingError,
    EmbeddedSource,
)
from deployments.models.store import DiskFullError, ModelStore, StoreNotWritableError


def no_source() -> EmbeddedSource:
    raise EmbeddedModelMissingError("pip install 'slackserve[cpu]'")


class TestFirstAndLaterUse:
    def test_it_converts_once(self, store: ModelStore, root: Path, converter: FakeConverter) -> None:
        first, second = store.ensure_embedded(), store.ensure_embedded()

        assert first == second == root / EMBEDDED_MODEL_ID
        assert converter.call_count == 1
        assert model_entries(root) == [EMBEDDED_MODEL_ID]

    def test_every_user_may_read_the_result(self, store: ModelStore) -> None:
        directory = store.ensure_embedded()

        assert all(path.stat().st_mode & 0o444 == 0o444 for path in directory.iterdir())

    def test_progress_rises_to_one_and_is_silent_when_there_is_nothing_to_do(self, store: ModelStore) -> None:
        first, second = Steps(), Steps()

        store.ensure_embedded(first)
        store.ensure_embedded(second)

        fractions = [fraction for _, fraction in first.seen]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)
        assert "half" in [stage for stage, _ in first.seen]
        assert second.seen == []

    def test_another_source_is_converted_again(
        self, store: ModelStore, root: Path, source: EmbeddedSource
    ) -> None:
        store.ensure_embedded()
        source.path.write_bytes(b"a newer wheel")
        newer = EmbeddedSource(source.path, "a newer wheel's", converted_bytes=1)

        def convert(_source: Path, destination: Path, _progress: ProgressCallback) -> None:
            (destination / "config.json").write_text("newer")

        directory = ModelStore(root, converter=convert, find_source=lambda: newer).ensure_embedded()

        assert (directory / "config.json").read_text() == "newer"

    def test_a_ready_model_needs_no_source(
        self, store: ModelStore, root: Path, converter: FakeConverter
    ) -> None:
        directory = store.ensure_embedded()

        assert ModelStore(root, converter=converter, find_source=no_source).ensure_embedded() == directory


class TestFailures:
    @pytest.mark.parametrize(
        "error", [ConversionFailedError("no"), KeyboardInterrupt(), PermissionError("no")]
    )
    def test_a_failed_conversion_leaves_nothing(
        self, store: ModelStore, root: Path, converter: FakeConverter, error: BaseException
    ) -> None:
        converter.error = error
        with pytest.raises(type(error)):
            store.ensure_embedded()
        assert model_entries(root) == []

        converter.error = None
        assert (store.ensure_embedded() / "config.json").is_file()

    def test_a_conversion_without_a_config_is_a_failure(self, root: Path, source: EmbeddedSource) -> None:
        store = ModelStore(root, converter=lambda *_: None, find_source=lambda: source)

        with pytest.raises(ConversionFailedError, match=r"config\.json"):
            store.ensure_embedded()
        assert model_entries(root) == []

    def test_too_little_space_is_noticed_before_converting(
        self, root: Path, source: EmbeddedSource, converter: FakeConverter
    ) -> None:
        huge = EmbeddedSource(source.path, source.fingerprint, converted_bytes=10**18)
        store = ModelStore(root, converter=converter, find_source=lambda: huge)

        with pytest.raises(DiskFullError) as caught:
            store.ensure_embedded()

        assert f"1000000000000 MB in {root}" in str(caught.value)
        assert converter.call_count == 0

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_disk_that_fills_up_meanwhile(
        self, store: ModelStore, root: Path, converter: FakeConverter, code: int
    ) -> None:
        converter.error = OSError(code, os.strerror(code))

        with pytest.raises(DiskFullError, match="XDG_CACHE_HOME"):
            store.ensure_embedded()
        assert model_entries(root) == []

    def test_a_root_that_cannot_be_made(self, tmp_path: Path, source: EmbeddedSource) -> None:
        (tmp_path / "file").write_text("in the way")
        store = ModelStore(tmp_path / "file" / "models", find_source=lambda: source)

        with pytest.raises(StoreNotWritableError, match="XDG_CACHE_HOME"):
            store.ensure_embedded()
