"""The processes of a replica's engine and the shared memory that they have, from the replica's process.

vLLM's EngineCore and its workers pass messages through files in /dev/shm, a quarter of a gigabyte for each
engine, which stay there when their makers are killed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import psutil

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory
_OURS: Final = ("psm_", "sem.mp-", "vllm_")
"""What Python's multiprocessing and vLLM make there. Ray's and UCX's have no name while they are used."""


def engine_processes(client: Any) -> list[psutil.Process]:
    """The processes of an engine that run, its EngineCore last; none of one that has none on this host."""
    manager = client.engine_core.resources.engine_manager
    found: list[psutil.Process] = []
    for engine in getattr(manager, "processes", ()):
        with contextlib.suppress(psutil.NoSuchProcess):
            core = psutil.Process(engine.pid)
            found += (*core.children(recursive=True), core)
    return found


def kill_engine(client: Any) -> None:
    """Kill an engine's processes, also those that are stopped."""
    # The core last: its end is what vLLM notices, and then none of the others shall be left.
    for process in engine_processes(client):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def give_up_engine(client: Any) -> None:
    """End what waits for an engine, as vLLM does when its processes have ended, although they are there."""
    resources = client.engine_core.resources
    resources.engine_dead = True
    if resources.output_queue_task is not None:
        resources.output_queue_task.cancel()


def unlink_shared_memory(client: Any) -> list[Path]:
    """Remove the names of what an engine has in shared memory, and return them.

    All who need it have it once the engine has started, and the memory is theirs for as long as one of them
    lives. Without a name it goes with the last, however that ends.
    """
    unlinked = sorted({path for process in engine_processes(client) for path in shared_memory_of(process)})
    for path in unlinked:
        path.unlink(missing_ok=True)
    return unlinked


def shared_memory_of(process: psutil.Process) -> set[Path]:
    """The files in shared memory that a process has mapped and that have a name."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:  # it has just ended
        return set()
    # By inode: who makes a semaphore has mapped it under a name that is gone at once.
    mapped = {int(line.split()[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}
    found = set()
    for path in named_shared_memory():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino in mapped:
                found.add(path)
    return found


def named_shared_memory() -> set[Path]:
    """The files in shared memory whose names an engine may have left behind."""
    return {path for path in _SHARED_MEMORY.iterdir() if path.name.startswith(_OURS)}
