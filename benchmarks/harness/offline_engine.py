"""Starts vLLM engines in and from this process, without Ray: SlackServe's scheduler and workers, or stock.

`offline_engine` gives an `LLM` whose scheduler runs here, so that one call takes one step. `async_engine`
gives an `AsyncLLM`, whose scheduler has a process of its own, as on the servers. The workers of both have
processes of their own. Engines on CPU get the environment of the servers' CPU engines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeVar

from prefill_node.board.board import Board
from prefill_node.engine_setup import SCHEDULER, EngineSetup

Result = TypeVar("Result")
BAREABLE_WORKER: Final = "benchmarks.harness.bare_worker.BareableWorker"
_UNCOMPILED: Final = "TORCHDYNAMO_DISABLE"
"""What the servers set for their engines on CPU, so that vLLM's sampler is not compiled."""
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@contextmanager
def offline_engine(
    model: Path | str, worker_cls: str, *, ranks: int = 1, setup: EngineSetup | None = None, **options: Any
) -> Iterator[tuple[Any, Board]]:
    """An `LLM` of vLLM's on CPU and its board; the process's first has a core of its own for each rank.

    Args:
        model: Directory of the model.
        worker_cls: Importable here and in the workers.
        ranks: Degree of tensor parallelism.
        setup: Preemption inside the engine; by default on.
        options: Further engine arguments.
    """
    cores = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(core) for core in cores[:ranks]) if len(cores) >= ranks else "nobind"
    _prepare(bind, is_gpu=False)
    with Board.create(ranks) as board:
        own = _arguments(model, board, setup or EngineSetup(mode="resume"), worker_cls, is_gpu=False)
        own |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
        with _scheduling_here(own | options) as llm:
            board.unlink()
            yield llm, board


@contextmanager
def stepped_engine(model: Path | str, **options: Any) -> Iterator[Any]:
    """An `LLM` of vLLM's on CPU, all in this process, whose steps the caller takes (`llm_engine.step`).

    Args:
        model: Directory of the model.
        options: Further engine arguments; without any, it is a stock one.
    """
    _prepare("nobind", is_gpu=False)
    own = _arguments(model, None, None, None, is_gpu=False) | {"distributed_executor_backend": "uni"}
    with _scheduling_here(own | options) as llm:
        yield llm


@contextmanager
def _scheduling_here(arguments: dict[str, Any]) -> Iterator[Any]:
    """An `LLM` whose scheduler runs here; nothing of it stays for the next one, even if it does not start."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, envs
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    try:
        llm = LLM(**arguments)
        core = llm.llm_engine.engine_core.engine_core
        try:
            yield llm
        finally:
            core.model_executor.shutdown()
            core.scheduler.shutdown()
    finally:
        destroy_model_parallel()  # of a worker in this process
        destroy_distributed_environment()
        envs.disable_envs_cache()  # the first engine of a process has what it read of the environment kept


@contextmanager
def async_engine(
    model: Path | str,
    *,
    setup: EngineSetup | None = None,
    worker_cls: str | None = None,
    cores: str | None = None,
    is_gpu: bool = False,
    as_shipped: bool = False,
    ranks: int = 1,
    **options: Any,
) -> Iterator[tuple[Any, Board | None]]:
    """An `AsyncLLM` of vLLM's, and its board; a stock one without a setup, which has no board.

    Args:
        model: Directory of the model.
        setup: Preemption inside the engine.
        worker_cls: By default the prefill worker of the machine, and vLLM's own without a setup.
        cores: What it computes on, as vLLM's `VLLM_CPU_OMP_THREADS_BIND` names them; without, vLLM chooses.
        is_gpu: Whether it runs on a GPU.
        as_shipped: Whether a stock engine is left as vLLM's own server has it: passes compiled, and in CUDA
            graphs on a GPU; steps composed ahead; its tokens of a step.
        ranks: Degree of tensor parallelism.
        options: Further engine arguments.
    """
    _prepare(cores, is_gpu=is_gpu, as_shipped=as_shipped)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    options = {"tensor_parallel_size": ranks, **options}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    board = None if setup is None else Board.create(ranks)
    try:
        own = _arguments(model, board, setup, worker_cls, is_gpu=is_gpu)
        context = UsageContext.ENGINE_CONTEXT
        if as_shipped:
            del own["enforce_eager"], own["async_scheduling"]
            context = UsageContext.OPENAI_API_SERVER  # what vLLM takes the size of a step from
        arguments = AsyncEngineArgs(**(own | options))
        engine = AsyncLLM.from_engine_args(arguments, usage_context=context)
        try:
            if board is not None:
                board.unlink()
            yield engine, board
        finally:
            engine.shutdown()
    finally:
        if board is not None:
            board.close()


def in_own_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a process that ends after it: vLLM and its threads do not leave one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def prefill_s(llm: Any, prompt: list[int]) -> float:
    """Seconds of one prefill on an `LLM`."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    started_s = time.perf_counter()
    llm.generate(
        [TokensPrompt(prompt_token_ids=prompt)],
        SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
        use_tqdm=False,
    )
    return time.perf_counter() - started_s


def _prepare(cores: str | None, *, is_gpu: bool, as_shipped: bool = False) -> None:
    """Set what vLLM reads from the environment; which cores it takes is left as this process has it."""
    os.environ |= _ENVIRONMENT
    if not is_gpu:
        from deployments.engines.environment import cpu_environment

        os.environ |= cpu_environment(kv_cache_gib=1)
        if as_shipped:
            os.environ.pop(_UNCOMPILED, None)
        if cores is not None:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)


def _arguments(
    model: Path | str, board: Board | None, setup: EngineSetup | None, worker_cls: str | None, *, is_gpu: bool
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16" if is_gpu else "float32",
        "enforce_eager": True,
        "async_scheduling": False,
        "disable_log_stats": True,
    }
    if board is None or setup is None:
        return arguments if worker_cls is None else arguments | {"worker_cls": worker_cls}
    default = "cuda.PreemptibleGPUWorker" if is_gpu else "cpu.PreemptibleCPUWorker"
    return arguments | {
        "scheduler_cls": SCHEDULER,
        "worker_cls": worker_cls or f"prefill_node.worker.{default}",
        "additional_config": replace(setup, board=str(board.path)).encode(),
    }
