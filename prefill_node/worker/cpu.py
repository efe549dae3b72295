"""The worker on a CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from vllm.config import CompilationMode
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from prefill_node.engine_setup import EngineSetup
from prefill_node.refusal import is_compiled
from prefill_node.worker.compiled.cpu_passes import PASS_MANAGER
from prefill_node.worker.worker import PreemptibleWorker
from sampling.worker import CarryingWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DISABLE: Final = "TORCHDYNAMO_DISABLE"
"""What PyTorch reads whenever something is to be compiled."""


class PreemptibleCPUWorker(PreemptibleWorker, CarryingWorker, CPUWorker):  # type: ignore[misc] # vLLM ships no types for it
    """`worker_cls` of a prefill replica on a CPU."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if EngineSetup.of(vllm_config).compiled:
            in_pieces(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, **kwargs: Any) -> None:
        """Load the model; one that is compiled is so although the environment keeps the sampler from it."""
        self._dynamo = os.environ.get(_DISABLE)
        if EngineSetup.of(self.vllm_config).compiled and is_compiled(self.vllm_config):
            os.environ.pop(_DISABLE, None)
        super().load_model(**kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """See `PreemptibleWorker`."""
        times = super().compile_or_warm_up_model()
        if self._dynamo is not None:
            os.environ[_DISABLE] = self._dynamo
        return times


def in_pieces(vllm_config: VllmConfig) -> None:
    """Have a model compiled in pieces with attention between them, as on an accelerator.

    vLLM compiles it as a whole on a CPU, to save time.
    """
    compilation = vllm_config.compilation_config
    if compilation.mode != CompilationMode.DYNAMO_TRACE_ONCE:
        return
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = None
    compilation.set_splitting_ops_for_v1(all2all_backend=vllm_config.parallel_config.all2all_backend)
    compilation.compile_sizes = []
    current_platform.get_pass_manager_cls = lambda: PASS_MANAGER
