"""The device that is measured: waiting for it, marks in its stream, and what it is.

On a host without a GPU the same code runs, so that it can be tried with a small model; its times say nothing.
"""

from __future__ import annotations

import subprocess
import time
from typing import Any

import torch

_HOLD_CYCLES = 30_000_000


class HostMark:
    """A mark in the work of a device that is the host itself."""

    _at_s = 0.0

    def record(self) -> None:
        """Everything before is done."""
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """The host is there, where the mark is."""
        return True

    def elapsed_time(self, later: HostMark) -> float:
        """Milliseconds until another mark."""
        return (later._at_s - self._at_s) * 1e3


class Device:
    """A GPU, or the host in place of one."""

    def __init__(self, kind: str) -> None:
        self.torch = torch.device(kind)
        self.is_gpu = kind == "cuda"

    @staticmethod
    def found() -> Device:
        """A GPU if there is one."""
        return Device("cuda" if torch.cuda.is_available() else "cpu")

    def wait(self) -> None:
        """Until everything launched has run."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """An event that the launch-ahead can wait for."""
        return torch.cuda.Event() if self.is_gpu else HostMark()

    def timing_mark(self) -> Any:
        """An event that also says when."""
        return torch.cuda.Event(enable_timing=True) if self.is_gpu else HostMark()

    def hold(self) -> None:
        """Keep the device busy for some milliseconds, so that what is launched next runs without gaps."""
        if self.is_gpu:
            torch.cuda._sleep(_HOLD_CYCLES)  # noqa: SLF001 - there is no other that waits on the device

    def about(self) -> dict[str, Any]:
        """Name, driver and versions, for the record."""
        if not self.is_gpu:
            return {"name": "host, no GPU", "is_gpu": False}
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "is_gpu": True,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "multiprocessors": properties.multi_processor_count,
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }


def driver_version() -> str | None:
    """NVIDIA's driver; None when it does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.split("\n")[0].strip() or None
