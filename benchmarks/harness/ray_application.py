"""An application on a Ray of its own, in a process that runs it until it is asked to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_READY: Final = "ready"


@contextmanager
def until_stopped(**options: Any) -> Iterator[None]:
    """Ray, for the block to start deployments on; they run until SIGINT or SIGTERM.

    Args:
        options: `ray.init`'s.
    """
    import ray
    from ray import serve

    stop = threading.Event()
    ray.init(**options)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ray installs its own, which leave without cleaning up
        signal.signal(number, lambda *_: stop.set())
    yield
    print(_READY, flush=True)
    stop.wait()
    serve.shutdown()
    ray.shutdown()


def says_ready(log: Path) -> bool:
    """Whether the block has ended in the process that writes this log."""
    return f"\n{_READY}\n" in log.read_text(errors="replace")
