"""Which CPU cores an engine computes on, within what its container may use.

A CPU limit of Docker or Kubernetes is a quota of time on all cores, which no affinity shows. Threads on more
cores than it pays for use it up early in each period, and then all of them stand still.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

_ROOT: Final = Path("/")
_Core = TypeVar("_Core", int, str)


def usable_cores() -> list[int]:
    """The cores of this process, as many as its quota pays for."""
    cores = sorted(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else _some(cores, int(quota))


def bind_engine(cores: Sequence[str], place: int) -> None:
    """Have the engine that this process starts compute on its cores, as many as the quota pays for.

    Args:
        cores: VLLM_CPU_OMP_THREADS_BIND of each replica by its place on the node; if empty, vLLM chooses.
        place: This replica's, from `take_port`.
    """
    if cores:
        binding = cores[place % len(cores)]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = within_quota(binding, cpu_quota())


def within_quota(binding: str, quota: float | None) -> str:
    """A value of VLLM_CPU_OMP_THREADS_BIND without the cores that are more than a quota pays for.

    Each tensor-parallel rank keeps one at least.
    """
    if quota is None:
        return binding
    ranks = [rank.split(",") for rank in binding.split("|")]
    return "|".join(",".join(_some(rank, int(quota) // len(ranks))) for rank in ranks)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """How many CPUs' time this process' control groups give it, of either version; None for no limit.

    Args:
        root: Where `proc` and `sys` are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = [quota for line in lines for folder in _folders(root, line) if (quota := _quota(folder))]
    return min(quotas, default=None)


def _folders(root: Path, line: str) -> Iterator[Path]:
    """Those of a control group and of all above it, if it is one of CPU time.

    A container may see its own group as the topmost, whatever name the group has outside.
    """
    _, controllers, name = line.split(":", 2)
    if not controllers:
        top = root / "sys/fs/cgroup"
    elif "cpu" in controllers.split(","):
        top = root / "sys/fs/cgroup/cpu"
    else:
        return
    own = Path(name.lstrip("/"))
    yield from (top / each for each in (own, *own.parents))


def _quota(folder: Path) -> float | None:
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _some(cores: list[_Core], count: int) -> list[_Core]:
    """As many of the cores as that, one at least; others in each container, as those of one host see all."""
    if count >= len(cores):
        return cores
    first = zlib.crc32(socket.gethostname().encode()) % len(cores)
    return sorted((cores[first:] + cores[:first])[: max(1, count)], key=cores.index)
