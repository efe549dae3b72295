"""Engines that share a GPU take their memory one after the other.

vLLM takes for its own use all that the GPU has less of after its profiling pass than before it loaded the
model. Two engines that start together so count each other's weights, and get little memory for KV, or none.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

GPU_PER_WORKER: Final = "VLLM_RAY_PER_WORKER_GPUS"
"""By which an engine knows what part of a GPU each of its workers has, and its workers know it."""
_SAID_EVERY_S: Final = 60.0
_log = logging.getLogger(__name__)


class TakesTurns:
    """Mixed into a vLLM worker, outermost: from before it looks at the GPU's memory until it has its own.

    The first rank does so for its engine, on each of its GPUs; the others wait for it in `init_device`,
    before they look. On several hosts only that of the first rank is guarded. A worker that dies gives its
    turns up.
    """

    rank: int
    parallel_config: Any
    _turns: ExitStack | None = None

    def init_device(self) -> None:
        """Wait for a turn on GPUs that are shared; then as vLLM."""
        if self.rank == 0 and float(os.environ.get(GPU_PER_WORKER, "1")) < 1:
            self._turns = _await_turns(self.parallel_config.assigned_physical_gpu_ids or ["all"])
        super().init_device()  # type: ignore[misc] # the worker mixed in

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM; all ranks have their KV memory then, and what graphs take: the next engine may begin."""
        try:
            return super().compile_or_warm_up_model()  # type: ignore[misc] # the worker mixed in
        finally:
            if self._turns is not None:
                self._turns.close()


def _await_turns(gpus: Sequence[int | str]) -> ExitStack:
    """A turn on each GPU, by its physical number; all take them in one order, so that no circle waits."""
    turns = ExitStack()
    for gpu in sorted(map(str, gpus)):
        path = Path(tempfile.gettempdir(), f"slackserve-gpu-{gpu}-{os.getuid()}.lock")
        turns.enter_context(_await_turn(FileLock(path, thread_local=False), gpu))
    return turns


def _await_turn(turn: FileLock, gpu: str) -> FileLock:
    """One that hangs as it starts keeps its turn: what is waited for is said again and again."""
    timeout_s = 0.0
    while True:
        try:
            turn.acquire(timeout=timeout_s)
        except Timeout:
            _log.warning("waiting until another engine has taken its memory of GPU %s, which is shared", gpu)
            timeout_s = _SAID_EVERY_S
        else:
            return turn
