"""Names of models are resolved: the embedded one, directories, ids of the hub."""

import errno
from pathlib import Path

import pytest
from small_store import FakeConverter

from deployments.models.embedded import EMBEDDED_MODEL_ID, EmbeddedSource
from deployments.models.store import ModelPathError, ModelStore, ResolvedModel, default_root


class TestResolve:
    @pytest.mark.parametrize("model", [None, EMBEDDED_MODEL_ID])
    def test_the_embedded_model_is_prepared(self, store: ModelStore, root: Path, model: str | None) -> None:
        resolved = store.resolve(model)

        assert resolved == ResolvedModel(EMBEDDED_MODEL_ID, str(root / EMBEDDED_MODEL_ID))
        assert (root / EMBEDDED_MODEL_ID / "config.json").is_file()

    def test_a_local_directory_is_served_under_its_own_name(self, store: ModelStore, tmp_path: Path) -> None:
        directory = tmp_path / "my-model"
        directory.mkdir()
        (directory / "config.json").write_text("{}")

        assert store.resolve(f"{directory}/") == ResolvedModel("my-model", str(directory))

    @pytest.mark.parametrize("model", ["my-model", "./my-model", "../here/my-model", "~/my-model"])
    def test_relative_and_home_paths(
        self, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
    ) -> None:
        directory = tmp_path / "here" / "my-model"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        monkeypatch.chdir(directory.parent)
        monkeypatch.setenv("HOME", str(directory.parent))

        assert store.resolve(model) == ResolvedModel("my-model", str(directory))

    def test_a_directory_that_may_not_be_entered_is_named(
        self, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(_: Path) -> bool:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "exists", refused)
        with pytest.raises(ModelPathError, match=rf"'{tmp_path}/model' cannot be read: Permission denied"):
            store.resolve(f"{tmp_path}/model")

    def test_a_directory_in_mistrals_format_is_a_model(self, store: ModelStore, tmp_path: Path) -> None:
        (tmp_path / "params.json").write_text("{}")

        assert store.resolve(str(tmp_path)).source == str(tmp_path)

    def test_the_current_directory_has_a_name_too(
        self, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "config.json").write_text("{}")
        monkeypatch.chdir(tmp_path)

        assert store.resolve(".").model_id == tmp_path.name

    def test_a_directory_without_a_config_is_refused(self, store: ModelStore, tmp_path: Path) -> None:
        with pytest.raises(ModelPathError, match=r"no config\.json"):
            store.resolve(str(tmp_path))

    def test_a_file_is_refused(self, store: ModelStore, source: EmbeddedSource) -> None:
        with pytest.raises(ModelPathError, match="is a file"):
            store.resolve(str(source.path))

    @pytest.mark.parametrize("model", ["/no/such/model", "./no-such", "../no-such", "~/no-such"])
    def test_a_path_to_nothing_is_not_taken_for_a_hub_id(self, store: ModelStore, model: str) -> None:
        with pytest.raises(ModelPathError, match="There is no directory"):
            store.resolve(model)

    def test_an_unknown_home_is_refused(self, store: ModelStore) -> None:
        with pytest.raises(ModelPathError, match="home directory"):
            store.resolve("~no-such-user-here/model")

    @pytest.mark.parametrize("model", ["", "  "])
    def test_an_empty_name_is_refused(self, store: ModelStore, model: str) -> None:
        with pytest.raises(ModelPathError, match="empty"):
            store.resolve(model)

    def test_anything_else_is_a_hub_id(self, store: ModelStore, converter: FakeConverter) -> None:
        assert store.resolve("Qwen/Qwen3-0.6B") == ResolvedModel("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
        assert converter.call_count == 0

    @pytest.mark.parametrize(
        "model",
        [
            "models/qwen/0.6b",
            " Qwen/Qwen3-0.6B",
            "Qwen/Qwen3-0.6B\n",
            "Qwen/",
            "owner/na me",
            "owner/name.git",
            "owner/no--name",
            "x" * 97,
            "s3://bucket",
            "s3://bucket/some/model",
            "gs://bucket/model",
            "abfss://container@account.dfs.core.windows.net/model",
            "azure://container@account/model",
            "https://huggingface.co/Qwen/Qwen3-0.6B",
        ],
    )
    def test_what_is_no_directory_and_can_be_no_hub_id_is_refused(
        self, store: ModelStore, model: str
    ) -> None:
        with pytest.raises(ModelPathError, match=r"neither a directory .* nor a Hugging Face id") as refused:
            store.resolve(model)
        assert repr(model) in str(refused.value)

    @pytest.mark.parametrize("model", ["gpt2", "google-t5/t5.small_v2"])
    def test_other_forms_of_ids_are_taken(self, store: ModelStore, model: str) -> None:
        assert store.resolve(model) == ResolvedModel(model, model)

    def test_the_default_root_honours_xdg_cache_home(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

        assert default_root() == tmp_path / "slackserve" / "models"
        assert not any(tmp_path.iterdir())
