"""What the engines of a replica start with: their environment on CPU, and no download by Ray."""

from __future__ import annotations

import os
from typing import Final

from ray.llm._internal.common.callbacks.base import CallbackBase

_THRESHOLDS: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""mallopt(3), bytes. The first is as large as glibc's own would grow."""


def allocator_environment() -> dict[str, str]:
    """Of an engine's processes; what this process's environment says about it is left as it is."""
    return {name: os.environ.get(name, value) for name, value in _THRESHOLDS.items()}


def cpu_environment(kv_cache_gib: int) -> dict[str, str]:
    """Of an engine's processes on CPU."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        # vLLM compiles its sampler with torch.compile even in eager mode; on a CPU that is a minute of C++
        # compilation inside the first request.
        "TORCHDYNAMO_DISABLE": "1",
        **allocator_environment(),
    }


class EngineLoadsModel(CallbackBase):  # type: ignore[misc] # Ray ships no types for it
    """Leaves finding and loading the model to the engine.

    Ray Serve LLM otherwise starts one more process on every node to download the model; with a local
    directory, or a hub id that vLLM downloads itself, that only costs its 20 seconds of imports.
    """

    async def on_before_node_init(self) -> None:
        """Skip Ray's own download."""
        self.ctx.run_init_node = False
