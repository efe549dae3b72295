"""What happens in a replica before its engine starts."""

from __future__ import annotations

from ray.llm._internal.common.callbacks.base import CallbackBase


class EngineLoadsModel(CallbackBase):  # type: ignore[misc] # Ray ships no types for it
    """Leaves finding and loading the model to the engine.

    Ray Serve LLM otherwise starts one more process on every node to download the model; with a local
    directory, or a hub id that vLLM downloads itself, that only costs its 20 seconds of imports.
    """

    async def on_before_node_init(self) -> None:
        """Skip Ray's own download."""
        self.ctx.run_init_node = False
