"""Carries a vLLM wheel to a machine without a network, in pieces, without what one GPU does not need of it.

`pack` drops the parts that `LEFT_OUT` names and cuts the rest into pieces. `unpack` joins the pieces on the
other machine, installs the small wheels that lie beside them, and prints what PYTHONPATH must begin with.
Only the standard library is needed, and pip. The commands are in docs/gpu.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

PIECE_BYTES: Final = 55 * 2**20
LEFT_OUT: Final = (
    "*/_vllm_fa2_C*",  # FlashAttention 2: a Hopper GPU runs 3
    "vllm/vllm-rs",  # the frontend in Rust
    "*/_moe_C*",  # mixtures of experts
    "*/third_party/deep_gemm/*",  # 8-bit matrices
    "*/third_party/fmha_sm100/*",  # another GPU's attention
    "*/_flashmla*",
    "*/_qutlass*",
    "*/swagger-ui*",
    "*.jpg",
)
MACHINE_LACKS: Final = (
    "annotated-types",
    "cachetools",
    "cbor2",
    "fastapi",
    "httpcore2",
    "httpx2",
    "jiter",
    "msgspec",
    "openai",
    "openai-harmony",
    "opentelemetry-api",
    "pybase64",
    "pydantic",
    "pydantic-core",
    "pyzmq",
    "sniffio",
    "starlette",
    "truststore",
    "typing-inspection",
)
"""What vLLM 0.26.0's engine imports at start and a machine with PyTorch and transformers may lack."""


class Pieces:
    """A stream that is written as files of at most `piece_bytes`."""

    def __init__(self, stem: Path, piece_bytes: int) -> None:
        self._stem = stem
        self._piece_bytes = piece_bytes
        self._file: IO[bytes] | None = None
        self._room = 0
        self.paths: list[Path] = []

    def write(self, data: bytes) -> int:
        """Append."""
        left = memoryview(data)
        while left:
            if self._room == 0:
                self._begin()
            assert self._file is not None
            self._file.write(left[: self._room])
            written = min(len(left), self._room)
            self._room -= written
            left = left[written:]
        return len(data)

    def __enter__(self) -> Self:
        """The stream."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the last piece."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        if self._file is not None:
            self._file.close()
        path = self._stem.with_name(f"{self._stem.name}.{len(self.paths):02}")
        self.paths.append(path)
        self._file, self._room = path.open("wb"), self._piece_bytes


def pack(wheel: Path, out: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Cut what is needed of a wheel into pieces, and return them."""
    out.mkdir(parents=True, exist_ok=True)
    with (
        zipfile.ZipFile(wheel) as members,
        Pieces(out / "vllm.tar.xz", piece_bytes) as pieces,
        tarfile.open(fileobj=pieces, mode="w|xz") as archive,
    ):
        for member in members.infolist():
            if any(fnmatch.fnmatch(member.filename, pattern) for pattern in LEFT_OUT) or member.is_dir():
                continue
            entry = tarfile.TarInfo(member.filename)
            entry.size = member.file_size
            entry.mode = 0o644
            with members.open(member) as content:
                archive.addfile(entry, content)
    return pieces.paths


def unpack(directories: list[Path], site: Path) -> None:
    """Join the pieces that lie in these directories, and install the wheels that do."""
    site.mkdir(parents=True, exist_ok=True)
    found = (path for directory in directories for path in directory.glob("vllm.tar.xz.*"))
    pieces = sorted(found, key=lambda path: path.name)
    if pieces:
        numbers = [int(path.suffix[1:]) for path in pieces]
        if numbers != [*range(len(numbers))]:
            raise SystemExit(f"pieces are missing: there are {[path.name for path in pieces]}")
        with tempfile.TemporaryFile() as joined:
            for path in pieces:
                joined.write(path.read_bytes())
            joined.seek(0)
            with tarfile.open(fileobj=joined, mode="r:xz") as archive:
                archive.extractall(site, filter="data")
    if wheels := sorted(str(path) for directory in directories for path in directory.glob("*.whl")):
        options = ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *wheels], check=True)  # noqa: S603


def main() -> None:
    """Pack here, or unpack there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="a wheel into pieces")
    packing.add_argument("wheel", type=Path)
    packing.add_argument("out", type=Path)
    unpacking = commands.add_parser("unpack", help="pieces and small wheels into a directory of packages")
    unpacking.add_argument("directories", type=Path, nargs="+")
    unpacking.add_argument("site", type=Path)
    commands.add_parser("lacks", help="names of the small wheels")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        for path in pack(arguments.wheel, arguments.out):
            print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")
    elif arguments.command == "unpack":
        unpack(arguments.directories, arguments.site)
        print(arguments.site)
    else:
        print(" ".join(MACHINE_LACKS))


if __name__ == "__main__":
    main()
