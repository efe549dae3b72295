"""The digest of a model: what replicas of two versions of a configuration know each other's models by.

Owns what it is made of: where the model is, what is configured that changes its KV cache or its tokens, or
among whose workers KV moves, and the files of a local directory. It is made once, where the application is
built, and told to all replicas, so that it is the same on every node. No times of files are in it, which
differ among copies.

All of the weights cannot be read for it, so it has pieces of them, in even distances: enough to tell apart
what was trained on. It does not tell apart what lies between them, nor what a hub id without a `revision`
stands for from one day to the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from deployments.config.settings import SlackServeConfig
from deployments.engines.arguments import alike_in_both, of_the_model
from deployments.models.fit import degrees_apart
from deployments.models.text_model import text_model
from slo.model_digest import ModelDigest

_WEIGHTS: Final = frozenset({".bin", ".gguf", ".pt", ".pth", ".safetensors"})
_OTHERS: Final = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"})
"""Configuration, tokenizer and code; they are read whole."""
_PIECE_BYTES: Final = 4096
_PIECES: Final = 2048
"""Of the weights, all files together; below 8 MiB that is all of them."""
_DIGEST_BYTES: Final = 8


def model_digest(source: str, config: SlackServeConfig) -> ModelDigest:
    """That of the model at `source`, a directory or a hub id, as it is served by a configuration."""
    served: dict[str, Any] = {
        "source": source,
        "accelerator": config.accelerator,
        "dtype": config.dtype,
        "engine_kwargs": alike_in_both(config),
    }
    if (degrees := degrees_apart(config, text_model(source, of_the_model(config)))) is not None:
        served["tensor_parallel_size"] = degrees
    digest = blake2b(json.dumps(served, sort_keys=True, default=str).encode(), digest_size=_DIGEST_BYTES)
    for content in _contents(Path(source)):
        digest.update(content)
    return ModelDigest(digest.hexdigest())


def _contents(directory: Path) -> Iterator[bytes]:
    """Of each file that engines may load: its name, its size and what is in it, or pieces of that."""
    if not directory.is_dir():
        return
    files = [path for path in sorted(directory.iterdir()) if path.suffix in _WEIGHTS | _OTHERS]
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    weights_bytes = sum(size for path, size in sizes.items() if path.suffix in _WEIGHTS)
    apart_bytes = max(_PIECE_BYTES, weights_bytes // _PIECES)
    for path, size in sizes.items():
        yield f"\0{path.name}\0{size}\0".encode()
        try:
            yield from _pieces(path, size, apart_bytes) if path.suffix in _WEIGHTS else (path.read_bytes(),)
        except OSError:  # what engines need and cannot read they say themselves
            yield b"unreadable"


def _pieces(path: Path, size: int, apart_bytes: int) -> Iterator[bytes]:
    """Pieces of a file, from its beginning on, and its end."""
    with path.open("rb") as file:
        for start in (*range(0, size, apart_bytes), max(0, size - _PIECE_BYTES)):
            file.seek(start)
            yield file.read(_PIECE_BYTES)
