"""vLLM's engine as Ray Serve LLM starts it, with what SlackServe starts otherwise.

An engine on CPU with one rank runs its worker inside EngineCore, as on other platforms: a process with all of
vLLM's imports less, and no message between two processes for each step. vLLM gives such a worker a process of
its own for the sake of OpenMP's variables, which must be there before the process begins; here EngineCore
begins with them. Of an engine that does not start it tells what the engine itself has printed: vLLM's error
points to that, and it is in no log of Serve's. Owns nothing else of the engine's start.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm.platforms import current_platform
from vllm.utils.ompmultiprocessing import OMPProcessManager

from telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_BYTES: Final = 1 << 20
"""Of what was printed, from its end."""
_EXCEPTION: Final = re.compile(
    r"^(?:\([\w ]+ pid=\d+[^)]*\) )+(?:ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): .+)$", re.MULTILINE
)
"""How vLLM's processes print one, by their logger or as Python does; Ray puts the worker after the engine."""
_COLOUR: Final = re.compile("\x1b\\[[0-9;]*m")
_OF_WORKER: Final = re.compile(r"Worker failed with error '(.+)', please check the stack trace")
"""What a worker that is an actor of Ray's has said; it prints elsewhere."""


class EngineNotStartedError(RuntimeError):
    """The engine has ended while it started; the message has its own words."""


class ReplicaEngine(VLLMEngine):  # type: ignore[misc] # Ray ships no types for it
    """`engine_cls` of both tiers' replicas."""

    def _start_async_llm_engine(self, args: Any, config: Any, placement_group: Any) -> Any:
        parallel = config.parallel_config
        with _told_why():
            if not current_platform.is_cpu() or parallel.world_size > 1:
                return super()._start_async_llm_engine(args, config, placement_group)
            parallel.distributed_executor_backend = "uni"
            with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0):
                return super()._start_async_llm_engine(args, config, placement_group)


@contextmanager
def _told_why() -> Iterator[None]:
    """Have the error of an engine's start say what the engine has printed, and where.

    Raises:
        EngineNotStartedError: in place of vLLM's error, where this process prints to files, as under Ray.
    """
    begun_at = {path: path.stat().st_size for path in _printed_to()}
    try:
        yield
    except RuntimeError as error:
        if not begun_at:
            raise
        # One that points to another is of a process that waited for the one that failed.
        found = [why for path, size in begun_at.items() for why in _exceptions(path, size)]
        found = [quoted[1] if (quoted := _OF_WORKER.search(why)) else why for why in found]
        causes = [why for why in found if "root cause" not in why]
        why = causes[-1] if causes else str(error)
        files = ", ".join(map(str, begun_at))
        words = f"the engine does not start: {why}; what it has printed is in {files}"
        logs.event("engine_not_started", level=logging.ERROR, error=words)
        raise EngineNotStartedError(words) from error


def _printed_to() -> list[Path]:
    """The files that this process and its children print to."""
    with suppress(OSError):
        paths = [Path(f"/proc/self/fd/{number}").readlink() for number in (1, 2)]
        return [path for path in dict.fromkeys(paths) if path.is_file()]
    return []


def _exceptions(path: Path, begun_at: int) -> list[str]:
    """The exceptions of vLLM's processes in a file, in the order in which they were printed."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(begun_at, path.stat().st_size - _MOST_BYTES))
        return _EXCEPTION.findall(_COLOUR.sub("", file.read().decode(errors="replace")))
    return []
