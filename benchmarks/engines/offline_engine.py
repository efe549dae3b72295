"""Starts a vLLM engine with SlackServe's scheduler and workers in this process, without Ray.

The scheduler runs here, so that one call takes one step; the workers run in processes of their own.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefill_node.board.board import Board
from prefill_node.engine_setup import EngineSetup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@contextmanager
def offline_engine(
    model: Path | str, worker_cls: str, *, ranks: int = 1, setup: EngineSetup | None = None, **options: Any
) -> Iterator[tuple[Any, Board]]:
    """An `LLM` of vLLM's and its board; the process's first has a core of its own for each rank.

    Args:
        model: Directory of the model.
        worker_cls: Importable here and in the workers.
        ranks: Degree of tensor parallelism.
        setup: Preemption inside the engine; by default on.
        options: Further engine arguments.
    """
    cores = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(core) for core in cores[:ranks]) if len(cores) >= ranks else "nobind"
    os.environ |= ENVIRONMENT
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bind)
    from vllm import LLM

    board = Board.create(ranks)
    setup = setup or EngineSetup(mode="resume")
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        async_scheduling=False,
        disable_log_stats=True,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        worker_cls=worker_cls,
        scheduler_cls="prefill_node.engine.scheduler.SlackScheduler",
        additional_config=replace(setup, board=str(board.path)).encode(),
        **options,
    )
    board.unlink()
    core = llm.llm_engine.engine_core.engine_core
    try:
        yield llm, board
    finally:
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        board.close()


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
