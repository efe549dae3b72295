"""Whether a vLLM has what SlackServe's scheduler and worker build on, by reading its source.

Owns the list of these names. Nothing is imported, so a wheel can be read that does not run here.

    python -m benchmarks.gpu.vllm_fit DIRECTORY    # where its `vllm` package lies
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

Definition: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


@dataclass(frozen=True, slots=True)
class Need:
    """Names of a class, or of a module.

    Attributes:
        file: Within the `vllm` package.
        owner: The class; empty for the module itself.
        names: Methods, properties, fields, or attributes that one of its methods sets.
        arguments: Of a method, what it must be possible to give it.
    """

    file: str
    owner: str
    names: tuple[str, ...]
    arguments: tuple[tuple[str, tuple[str, ...]], ...] = ()


_SCHEDULER = "v1/core/sched/scheduler.py"
NEEDS: Final = (
    Need(
        _SCHEDULER,
        "Scheduler",
        (
            "kv_cache_manager",
            "running",
            "waiting",
            "skipped_waiting",
            "requests",
            "policy",
            "connector",
            "block_size",
            "vllm_config",
            "prev_step_scheduled_req_ids",
            "_inflight_prefills",
            "pause_state",
            "schedule",
            "shutdown",
        ),
        (
            ("add_request", ("request",)),
            ("update_from_output", ("scheduler_output", "model_runner_output")),
            ("finish_requests", ("request_ids", "finished_status")),
            ("_free_blocks", ("request",)),
            ("_preempt_request", ("request", "timestamp")),
        ),
    ),
    Need(
        "v1/core/kv_cache_manager.py",
        "KVCacheManager",
        ("block_pool",),
        (
            ("allocate_slots", ("delay_cache_blocks",)),
            ("cache_blocks", ("request", "num_computed_tokens")),
            ("get_block_ids", ("request_id",)),
        ),
    ),
    Need("v1/core/block_pool.py", "BlockPool", ("get_num_free_blocks",)),
    Need("v1/core/sched/interface.py", "PauseState", ("UNPAUSED", "PAUSED_ALL")),
    Need("v1/core/sched/request_queue.py", "", (), (("create_request_queue", ("policy",)),)),
    Need(
        "v1/core/sched/output.py", "SchedulerOutput", ("num_scheduled_tokens", "total_num_scheduled_tokens")
    ),
    Need(
        "v1/request.py",
        "Request",
        (
            "request_id",
            "num_computed_tokens",
            "num_in_flight_tokens",
            "num_prompt_tokens",
            "num_tokens",
            "is_prefill_chunk",
            "sampling_params",
            "arrival_time",
            "is_finished",
        ),
    ),
    Need("v1/outputs.py", "ModelRunnerOutput", ("req_ids", "req_id_to_index", "kv_connector_output")),
    Need(
        "v1/worker/gpu_worker.py",
        "Worker",
        ("model_runner", "load_model"),
        (("execute_model", ("scheduler_output",)),),
    ),
    Need(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner",
        ("execute_model_state", "kv_connector_output", "input_batch", "get_model"),
    ),
    Need(
        "config/vllm.py",
        "VllmConfig",
        ("use_v2_model_runner", "additional_config", "kv_transfer_config", "compilation_config"),
    ),
    Need("config/compilation.py", "CompilationMode", ("NONE",)),
    Need("config/kv_transfer.py", "KVTransferConfig", ("kv_buffer_device",)),
    Need(
        "config/model.py",
        "ModelConfig",
        ("is_multimodal_model", "is_encoder_decoder", "runner_type", "is_hybrid", "is_attention_free"),
    ),
    Need(
        "distributed/parallel_state.py",
        "",
        ("get_tp_group",),
        (("in_the_same_node_as", ("pg", "source_rank")),),
    ),
    Need(
        "model_executor/layers/attention_layer_base.py",
        "AttentionLayerBase",
        ("get_attn_backend", "get_kv_cache_spec"),
    ),
    Need(
        "v1/engine/async_llm.py",
        "AsyncLLM",
        ("from_engine_args", "shutdown"),
        (("generate", ("prompt", "sampling_params", "request_id")), ("collective_rpc", ("method", "args"))),
    ),
    Need(
        "distributed/kv_transfer/kv_connector/v1/nixl/connector.py",
        "",
        ("NixlPullConnector",),
    ),
)


def missing(package: Path) -> list[str]:
    """What a vLLM lacks, in words; empty if it fits.

    Args:
        package: Its directory, the one with `v1` in it.
    """
    return [problem for need in NEEDS for problem in _missing(package, need)]


def _missing(package: Path, need: Need) -> list[str]:
    path = package / need.file
    if not path.is_file():
        return [f"there is no {need.file}"]
    body = ast.parse(path.read_text()).body
    if need.owner:
        owners = [node for node in body if isinstance(node, ast.ClassDef) and node.name == need.owner]
        if not owners:
            return [f"{need.file} has no {need.owner}"]
        body = owners[0].body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    there = functions.keys() | _assigned(body) | _set_on_self(functions.values())
    there |= {node.name for node in body if isinstance(node, ast.ClassDef)}
    where = f"{need.file}: {need.owner}".removesuffix(": ")
    problems = [f"{where} has no {name}" for name in need.names if name not in there]
    for name, wanted in need.arguments:
        if (function := functions.get(name)) is None:
            problems.append(f"{where} has no {name}")
        else:
            problems += [f"{where}: {name} takes no {word}" for word in wanted if not _takes(function, word)]
    return problems


def _takes(function: Definition, word: str) -> bool:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return word in names or given.kwarg is not None


def _assigned(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _set_on_self(functions: object) -> set[str]:
    return {
        node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def main() -> None:
    """Print what is missing; fail if anything is."""
    directory = Path(sys.argv[1])
    package = directory / "vllm" if (directory / "vllm").is_dir() else directory
    problems = missing(package)
    print("\n".join(problems) or "it has all that SlackServe builds on")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
