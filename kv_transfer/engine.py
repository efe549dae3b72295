"""vLLM's engine as Ray Serve LLM starts it, with what SlackServe starts otherwise.

An engine on CPU with one rank runs its worker inside EngineCore, as on other platforms: a process with all of
vLLM's imports less, and no message between two processes for each step. vLLM gives such a worker a process of
its own for the sake of OpenMP's variables, which must be there before the process begins; here EngineCore
begins with them. Owns nothing else of the engine's start.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm.platforms import current_platform
from vllm.utils.ompmultiprocessing import OMPProcessManager


class ReplicaEngine(VLLMEngine):  # type: ignore[misc] # Ray ships no types for it
    """`engine_cls` of both tiers' replicas."""

    def _start_async_llm_engine(self, args: Any, config: Any, placement_group: Any) -> Any:
        parallel = config.parallel_config
        if not current_platform.is_cpu() or parallel.world_size > 1:
            return super()._start_async_llm_engine(args, config, placement_group)
        parallel.distributed_executor_backend = "uni"
        with OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0):
            return super()._start_async_llm_engine(args, config, placement_group)
