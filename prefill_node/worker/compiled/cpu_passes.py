"""vLLM's passes over a compiled graph, where a CPU lacks what one of them asks for.

`FixFunctionalizationPass` names operators that vLLM builds for accelerators only. It turns copies into writes
in place, which PyTorch's own compiler does as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

PASS_MANAGER = f"{__name__}.CPUPassManager"
"""For `Platform.get_pass_manager_cls`."""


class _LeftToPyTorch(FixFunctionalizationPass):  # type: ignore[misc] # vLLM ships no types for it
    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change nothing."""


class CPUPassManager(PostGradPassManager):  # type: ignore[misc] # vLLM ships no types for it
    """Without the pass that needs an accelerator."""

    def configure(self, config: VllmConfig) -> None:
        """See vLLM's."""
        super().configure(config)
        self.fix_functionalization = _LeftToPyTorch(config)
