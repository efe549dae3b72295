"""What engines on CPU need in their environment.

glibc gives what a pass frees back to the system, and the next pass has it zeroed page by page again, until
something large has been freed and its thresholds have grown. Owns the thresholds to start with.
"""

from __future__ import annotations

import os
from typing import Final

_THRESHOLDS: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""mallopt(3), bytes. The first is as large as glibc's own would grow."""


def allocator_environment() -> dict[str, str]:
    """Of an engine's processes; what this process's environment says about it is left as it is."""
    return {name: os.environ.get(name, value) for name, value in _THRESHOLDS.items()}


def cpu_environment(kv_cache_gib: int) -> dict[str, str]:
    """Of an engine's processes on CPU.

    Args:
        kv_cache_gib: Memory for the KV cache, GiB.
    """
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        # vLLM compiles its sampler with torch.compile even in eager mode; on a CPU that is a minute of C++
        # compilation inside the first request.
        "TORCHDYNAMO_DISABLE": "1",
        **allocator_environment(),
    }
