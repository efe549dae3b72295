"""Which cores the KV transfer's threads run on, on a machine without accelerator.

vLLM's connector moves the thread that makes it, which is the one that computes, to the machine's last core,
that of every CPU engine to the same; and NIXL's progress thread, which is always busy, stays where that
thread was. Owns that it is the other way round.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def transfer_threads_apart() -> Iterator[None]:
    """Threads that start within run on the last core of those that this process' parent may use.

    The calling thread is back on its own cores afterwards, wherever it was moved meanwhile.
    """
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(os.getppid()))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
