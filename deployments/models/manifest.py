"""The manifest of a prepared model directory: what it holds, and whether it still holds that.

Owns: the manifest's format, writing one for a finished directory, and inspecting a directory against its
own. Does not own: what to do about a damaged directory, locks, or conversion (see `model_store`).

How far an inspection goes: sizes are compared every time; a file whose modification time also matches is
taken as intact, and one whose modification time differs is hashed. Any ordinary write is caught, at the cost
of a few `stat` calls. Bytes that change beneath the file system, leaving size and time alone, are not.
"""

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

MANIFEST_NAME: Final = "slackserve-manifest.json"
FORMAT_VERSION: Final = 1
"""Raised whenever the conversion would write something else for the same source."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file as it was when the conversion finished."""

    size_bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A directory's contents, and the file it was converted from.

    `files` maps names relative to the directory to entries. The manifest itself is not among them.
    """

    format_version: int
    source_name: str
    source_sha256: str
    files: Mapping[str, FileEntry]


class Condition(Enum):
    """What an inspection found."""

    INTACT = "intact"
    TOUCHED = "touched"  # modification times differ, contents do not
    ABSENT = "absent"
    NO_MANIFEST = "no_manifest"
    BAD_MANIFEST = "bad_manifest"
    OTHER_FORMAT = "other_format"
    OTHER_SOURCE = "other_source"
    FILE_MISSING = "file_missing"
    SIZE_DIFFERS = "size_differs"
    CONTENT_DIFFERS = "content_differs"


@dataclass(frozen=True, slots=True)
class Inspection:
    """A directory's condition, and a sentence about it for the log."""

    condition: Condition
    detail: str

    @property
    def is_servable(self) -> bool:
        """Whether the directory holds what its manifest says."""
        return self.condition in {Condition.INTACT, Condition.TOUCHED}


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, source_name: str, source_sha256: str) -> Manifest:
    """Make every file in `directory` durable and world-readable, hash it, and write the manifest.

    Raises:
        OSError: a file cannot be read or synced.
    """
    files = {
        path.relative_to(directory).as_posix(): _seal(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }
    manifest = Manifest(FORMAT_VERSION, source_name, source_sha256, files)
    _store(directory, manifest)
    return manifest


def refresh_times(directory: Path) -> None:
    """Record the files' present modification times, so that the next inspection need not hash them.

    Call it only on a directory just found `TOUCHED`.

    Raises:
        OSError: the directory is not writable.
    """
    manifest = _load(directory)
    files = {
        name: replace(entry, mtime_ns=(directory / name).stat().st_mtime_ns)
        for name, entry in manifest.files.items()
    }
    _store(directory, replace(manifest, files=files))


def inspect(directory: Path, source_sha256: str | None) -> Inspection:
    """Compare a directory with its manifest. Files that the manifest does not list are ignored.

    `source_sha256` is the hash of the file that the directory should have been converted from; None skips
    that comparison (the source is gone, and what was made of it can still be served).
    """
    if not directory.is_dir():
        return Inspection(Condition.ABSENT, f"{directory} is not a directory")
    try:
        manifest = _load(directory)
    except FileNotFoundError:
        return Inspection(Condition.NO_MANIFEST, f"{directory} has no {MANIFEST_NAME}")
    except msgspec.DecodeError as error:
        return Inspection(Condition.BAD_MANIFEST, f"{directory / MANIFEST_NAME} cannot be read: {error}")
    if manifest.format_version != FORMAT_VERSION:
        detail = f"it has format {manifest.format_version}, and this version writes {FORMAT_VERSION}"
        return Inspection(Condition.OTHER_FORMAT, detail)
    if source_sha256 not in {None, manifest.source_sha256}:
        return Inspection(Condition.OTHER_SOURCE, f"it was converted from another {manifest.source_name}")
    found = [_inspect_file(directory / name, entry) for name, entry in manifest.files.items()]
    damaged = next((inspection for inspection in found if not inspection.is_servable), None)
    touched = next((inspection for inspection in found if inspection.condition is Condition.TOUCHED), None)
    return damaged or touched or Inspection(Condition.INTACT, "sizes and modification times match")


def _inspect_file(path: Path, entry: FileEntry) -> Inspection:
    try:
        status = path.stat()
    except FileNotFoundError:
        return Inspection(Condition.FILE_MISSING, f"{path.name} is missing")
    if not stat.S_ISREG(status.st_mode):
        return Inspection(Condition.FILE_MISSING, f"{path.name} is not a file")
    if status.st_size != entry.size_bytes:
        detail = f"{path.name} has {status.st_size} bytes, not {entry.size_bytes}"
        return Inspection(Condition.SIZE_DIFFERS, detail)
    if status.st_mtime_ns == entry.mtime_ns:
        return Inspection(Condition.INTACT, f"{path.name} is as it was written")
    if file_sha256(path) != entry.sha256:
        return Inspection(Condition.CONTENT_DIFFERS, f"{path.name} does not match its SHA-256")
    return Inspection(Condition.TOUCHED, f"{path.name} has another modification time")


def _seal(path: Path) -> FileEntry:
    """Sync one file, open it to every reader (safetensors are written for the owner alone), and hash it."""
    path.chmod(path.stat().st_mode | stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    sync(path)
    status = path.stat()
    return FileEntry(status.st_size, status.st_mtime_ns, file_sha256(path))


def sync(path: Path) -> None:
    """Flush a file's contents, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load(directory: Path) -> Manifest:
    return msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)


def _store(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step: a reader sees the old one or the new one."""
    partial = directory / f".{MANIFEST_NAME}.{os.getpid()}"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    sync(partial)
    partial.replace(directory / MANIFEST_NAME)
    sync(directory)
