"""A prefill replica's engine: one that can be stopped, or else vLLM's as it is by itself.

That a pass can be stopped costs something: it is eager unless that is set otherwise, runs on vLLM's first
model runner, and no step is composed while one runs. An engine that could not be stopped anyway shall not pay
for it. Owns how the engine is started then. Whether it could is `prefill_node.refusal`'s, as far as vLLM's
configuration tells.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kv_transfer.engine import ReplicaEngine
from prefill_node.engine_setup import ASYNC_SCHEDULER, SCHEDULER, EngineSetup
from prefill_node.refusal import why_not

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"


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
            with_first_runner(os.environ, callback_ctx)
            prepared = super()._prepare_engine_config(callback_ctx)
            if (why := why_not(prepared[2])) is None:
                return tuple(prepared)
            self.refused = why
            without_first_runner(os.environ, callback_ctx)
            refused = replace(setup, refused=why, compiled=False, stop_within_s=float("inf"))
            additional = {**(given.get("additional_config") or {}), **refused.encode()}
            self.llm_config.update_engine_kwargs(**setup.stock, additional_config=additional)
        prepared = super()._prepare_engine_config(callback_ctx)
        scheduler = prepared[2].scheduler_config
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
        return tuple(prepared)


def with_first_runner(environment: Any, callback_ctx: Any) -> None:
    """Have the engine, and the task that makes its configuration, use vLLM's first model runner.

    Where the operator has chosen one, that stays.
    """
    environment.setdefault(RUNNER_VARIABLE, _FIRST)
    callback_ctx.runtime_env = _with(callback_ctx.runtime_env, environment[RUNNER_VARIABLE])


def without_first_runner(environment: Any, callback_ctx: Any) -> None:
    """Have them use what vLLM would; what the operator has chosen looks no different from our own choice."""
    if environment.get(RUNNER_VARIABLE) == _FIRST:
        environment.pop(RUNNER_VARIABLE)
        callback_ctx.runtime_env = _with(callback_ctx.runtime_env, None)


_FIRST: Final = "0"


def _with(runtime_env: Mapping[str, Any] | None, value: str | None) -> dict[str, Any]:
    """A task's environment with another choice of the model runner; none for None."""
    env = dict(runtime_env or {})
    variables = {key: each for key, each in (env.get("env_vars") or {}).items() if key != RUNNER_VARIABLE}
    env["env_vars"] = variables if value is None else variables | {RUNNER_VARIABLE: value}
    return env
