"""A small embedded model for the model store, and a converter in the real one's place."""

from dataclasses import dataclass, field
from pathlib import Path

from deployments.models.conversion import ProgressCallback

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


def model_entries(root: Path) -> list[str]:
    """What is in the store, apart from its lock."""
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))
