"""How a NIXL agent waits for transfers: asleep, instead of in a loop that takes a whole core.

NIXL's Python API makes every agent with a progress thread that polls without a pause (`pthrDelay = 0`), and
offers no argument for it. With any other value the thread sleeps on UCX's events; it wakes for an event at
once, not after the delay. Owns that one value, see
[ADR 0014](../docs/adr/0014-nixls-progress-thread-sleeps.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_DELAY_US: Final = 100_000
"""Longest sleep without an event. 10 ms cost 0.5 % of a core where 100 ms cost nothing measurable."""


class NixlChangedError(RuntimeError):
    """The installed NIXL does not make its agents as the pinned one does."""


@contextmanager
def sleeping_progress_threads() -> Iterator[None]:
    """Agents that this process makes within have a progress thread that sleeps.

    Raises:
        NixlChangedError: NIXL has another way of making agents, or none is installed.
    """
    bindings = _bindings()
    original = bindings.nixlAgent

    def sleeping(name: str, config: Any) -> Any:
        config.pthrDelay = _DELAY_US
        return original(name, config)

    bindings.nixlAgent = sleeping
    try:
        yield
    finally:
        bindings.nixlAgent = original


def _bindings() -> Any:
    """The extension module out of which vLLM's NIXL wrapper makes its agents."""
    from vllm.distributed.nixl_utils import NixlWrapper  # noqa: PLC0415 - imports NIXL, in EngineCore's workers only

    module = sys.modules.get(getattr(NixlWrapper, "__module__", ""))
    bindings: Any = getattr(module, "nixlBind", None)
    if not (hasattr(bindings, "nixlAgent") and hasattr(bindings.nixlAgentConfig, "pthrDelay")):
        raise NixlChangedError(
            f"NIXL's agents are not made by `nixlBind.nixlAgent` with a `pthrDelay` in {NixlWrapper!r}: "
            "install nixl==1.3.2, or adapt kv_transfer/nixl_agent.py"
        )
    return bindings
