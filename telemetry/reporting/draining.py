"""Being shut down by Serve: noticing it, and waiting for what others still need from here.

Serve calls a replica's `__del__` only after its last request has ended, too late to have new ones placed
elsewhere; that the shutdown has begun is known to Serve's own wrapper around the replica, so that is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import ray
from ray._private.worker import global_worker

_LOOK_S: Final = 0.05


def is_draining() -> bool:
    """Whether Serve is shutting the replica down that runs in this process; False where that is not known."""
    if not ray.is_initialized():
        return False
    for actor in global_worker.actors.values():
        replica = getattr(actor, "_replica_impl", None)
        if getattr(replica, "_shutting_down", False):
            return True
    return False


async def until(is_done: Callable[[], bool], within_s: float) -> bool:
    """Whether something came true within a time; looks often."""
    deadline_s = time.monotonic() + within_s
    while not is_done():
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
