"""What in an engine's configuration keeps its forward pass from being stopped.

The replica reads it before the engine starts, and starts one that cannot be stopped as vLLM does by itself;
the workers read it again. What only a loaded model shows, its layers and whether it resumes exactly, is
`prefill_node.worker`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs
from vllm.config import CompilationMode, CUDAGraphMode

from prefill_node.engine_setup import EngineSetup

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def is_compiled(vllm_config: VllmConfig) -> bool:
    """Whether vLLM compiles the model in any way."""
    return bool(vllm_config.compilation_config.mode != CompilationMode.NONE)


def _breaks_graphs(mode: CUDAGraphMode | None) -> bool:
    """Whether vLLM breaks CUDA graphs at attention; a whole one is replayed for short passes alone."""
    if mode is None or mode == CUDAGraphMode.NONE:
        return False
    return bool(mode.has_piecewise_cudagraphs() or envs.VLLM_USE_BREAKABLE_CUDAGRAPH)


def why_not(vllm_config: VllmConfig) -> str | None:
    """What in an engine's configuration keeps its forward pass from being stopped; None for nothing."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kv_transfer, compilation = vllm_config.kv_transfer_config, vllm_config.compilation_config
    device, offload = vllm_config.device_config.device_type, vllm_config.offload_config
    images = model.multimodal_config
    reasons = {
        "the model is compiled; set enforce_eager, or preemption.compiled": (
            is_compiled(vllm_config) and not EngineSetup.of(vllm_config).compiled
        ),
        "the model is compiled as a whole; set no use_inductor_graph_partition and no fuse_attn_quant": (
            is_compiled(vllm_config)
            and not (device == "cpu" and compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE)
            and (compilation.mode != CompilationMode.VLLM_COMPILE or not compilation.splitting_ops)
        ),
        "vLLM has CUDA graphs in place of compiled passes here, and replays them without stopping; "
        "set enforce_eager in place of preemption.compiled": (
            compilation.mode == CompilationMode.NONE and _breaks_graphs(compilation.cudagraph_mode)
        ),
        "vLLM's older Ray executor runs steps past the worker; unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND": (
            parallel.distributed_executor_backend == "ray" and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND
        ),
        "pipeline parallelism hands states on within a step": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism has ranks that vote apart": parallel.prefill_context_parallel_size > 1,
        "data parallelism runs steps in lockstep": parallel.data_parallel_size > 1,
        "speculative decoding runs a second model within a step": vllm_config.speculative_config is not None,
        "the model reads more than text; prefill.engine_kwargs can have language_model_only": (
            images is not None and not images.language_model_only
        ),
        "the first layer's input is memory of all steps; unset enable_prompt_embeds, enable_mm_embeds": (
            model.enable_prompt_embeds or (images is not None and images.enable_mm_embeds)
        ),
        "weights are fetched in the order of a whole pass; unset offload_group_size": (
            offload.prefetch.offload_group_size > 0 and offload.offload_backend != "uva"
        ),
        "how attention is computed depends on who else holds KV blocks; set disable_cascade_attn": (
            not model.disable_cascade_attn and not vllm_config.use_v2_model_runner
        ),
        "the model is an encoder": model.is_encoder_decoder or model.runner_type != "generate",
        "the model keeps a recurrent state, which a repeated step would advance twice": (
            model.is_hybrid or model.is_attention_free
        ),
        "KV blocks are copied to the host after each step; set kv_transfer.buffer_device to auto": (
            kv_transfer is not None and kv_transfer.kv_buffer_device != device
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
