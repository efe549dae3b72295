"""A prefill replica's engine: one that can be stopped, or else vLLM's as it is by itself.

That a pass can be stopped costs something: it is eager unless that is set otherwise, and no step is composed
while one runs. An engine that could not be stopped anyway shall not pay for it. Owns how the engine is
started then. Whether it could is `prefill_node.refusal`'s, as far as vLLM's configuration tells.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_host.engine import ReplicaEngine
from prefill_node.engine_setup import ASYNC_SCHEDULER, SCHEDULER, EngineSetup
from prefill_node.refusal import why_not


class PrefillEngine(ReplicaEngine):
    """`engine_cls` of a prefill replica.

    Attributes:
        refused: Why no step can be stopped, as far as the configuration says; empty for nothing.
    """

    refused: str = ""

    def _prepare_engine_config(self, callback_ctx: Any) -> tuple[Any, Any, Any]:
        """What vLLM is started with, in the first of two ways that is possible."""
        given = self.llm_config.engine_kwargs
        setup = EngineSetup.of_arguments(given.get("additional_config"))
        if setup.mode != "off":
            prepared = super()._prepare_engine_config(callback_ctx)
            if (why := why_not(prepared[2])) is None:
                return tuple(prepared)
            self.refused = why
            refused = replace(setup, refused=why, compiled=False, stop_within_s=float("inf"))
            additional = {**(given.get("additional_config") or {}), **refused.encode()}
            self.llm_config.update_engine_kwargs(**setup.stock, additional_config=additional)
        prepared = super()._prepare_engine_config(callback_ctx)
        scheduler = prepared[2].scheduler_config
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
        return tuple(prepared)
