"""Engines that share a GPU take their memory one after the other.

vLLM takes for its own use all that the GPU has less of after its profiling pass than before it loaded the
model. Two engines that start together so count each other's weights, and get little memory for KV, or none.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

GPU_PER_WORKER: Final = "VLLM_RAY_PER_WORKER_GPUS"
"""By which an engine knows what part of a GPU each of its workers has, and its workers know it."""
_log = logging.getLogger(__name__)


class TakesTurns:
    """Mixed into a vLLM worker, outermost: from before it looks at the GPU's memory until it has its own.

    The first rank does so for its engine; the others wait for it in `init_device`, before they look. On
    several hosts only that of the first rank is guarded. A worker that dies gives its turn up.
    """

    rank: int
    _turn: FileLock | None = None

    def init_device(self) -> None:
        """Wait for a turn if GPUs are shared; then as vLLM."""
        if self.rank == 0 and float(os.environ.get(GPU_PER_WORKER, "1")) < 1:
            self._turn = _await_turn(Path(tempfile.gettempdir(), f"slackserve-gpus-{os.getuid()}.lock"))
        super().init_device()  # type: ignore[misc] # the worker mixed in

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM; all ranks have their KV memory then, and what graphs take: the next engine may begin."""
        try:
            return super().compile_or_warm_up_model()  # type: ignore[misc] # the worker mixed in
        finally:
            if self._turn is not None:
                self._turn.release()


def _await_turn(path: Path) -> FileLock:
    turn = FileLock(path, thread_local=False)
    try:
        turn.acquire(blocking=False)
    except Timeout:
        _log.info("waiting until another engine on this host has taken its memory of a GPU that is shared")
        turn.acquire()
    return turn
