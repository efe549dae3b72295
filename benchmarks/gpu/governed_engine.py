"""A vLLM engine in a process of its own and, if it is ours, the governor in this one; without Ray.

Owns what `prefill_node.replica.server` does around an engine, as far as prefills go: the ledger, the board,
the watch. A stock engine is the same without them.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.offline_engine import BAREABLE_WORKER, async_engine
from prefill_node.board.board import Board
from prefill_node.engine_setup import EngineSetup, PreemptionSupport
from prefill_node.replica.governing.governor import ForwardProfile, Governor
from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from prefill_node.replica.job_spans import JobSpans
from prefill_node.replica.preemption_controller import Watch
from prefill_node.replica.preemption_metrics import PreemptionRecord
from simulator.cost.operators import ModelShape
from slo.predict.prefill_time import PrefillPredictor, Sample, fit
from slo.preemption.types import PreemptionRules
from slo.queue.order import QueueOrder
from slo.queue.slack import NO_DEADLINE
from slo.request import (
    ARRIVED_XARG,
    DEADLINE_XARG,
    JOB_XARG,
    PREDICTOR_XARG,
    STOP_BOUND_XARG,
    TIER_XARG,
    WEIGHT_XARG,
    JobId,
)
from slo.tiers import DEFAULT_TIERS, STANDARD
from telemetry.catalogue import Metric

_WEIGHT = 1.0


@dataclass(frozen=True, slots=True)
class EngineArm:
    """One way to serve.

    Attributes:
        chunk_tokens: Most tokens of a pass; None for a whole prompt, however long.
        is_ours: SlackServe's scheduler, worker and governor; else stock vLLM, first come first served.
        is_compiled: Whether vLLM compiles the passes.
        in_graphs: Whether short eager passes are in CUDA graphs, which run without stopping.
        as_shipped: Whether a stock engine is as vLLM's own server has it, also in the tokens of a pass.
    """

    name: str
    chunk_tokens: int | None = None
    is_ours: bool = False
    is_compiled: bool = False
    in_graphs: bool = False
    as_shipped: bool = False


class Tally:
    """Metrics of `prefill_node.replica.preemption_metrics`, kept as numbers."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self.counts: dict[str, float] = defaultdict(float)

    def count(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self.counts[".".join((metric.name, *labels.values()))] += value

    def observe(self, metric: Metric, value: float, **labels: str) -> None:  # noqa: ARG002 - as Instruments
        """Keep a value."""
        self.values[metric.name].append(value)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Gauges are not kept."""


class GovernedEngine:
    """An engine that prefills, and what it knows about itself."""

    def __init__(self, engine: Any, arm: EngineArm, vocabulary: int, seed: int) -> None:
        self.engine = engine
        self.arm = arm
        self.tally = Tally()
        self.governor: Governor | None = None
        self.granularity = ""
        self.predictor = PrefillPredictor(0.0, 0.0)
        self._watch: Watch | None = None
        self._record: PreemptionRecord | None = None
        self._numbers = itertools.count(1)
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary

    def about(self) -> dict[str, Any]:
        """What runs here, as vLLM has it once it has started."""
        config = self.engine.vllm_config
        return {
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
            "compilation": config.compilation_config.mode.name,
            "cuda_graphs": config.compilation_config.cudagraph_mode.name,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "pass_tokens": config.scheduler_config.max_num_batched_tokens,
        }

    async def prefill(self, tokens: int, ttft_s: float | None = None) -> float:
        """Seconds from here to the first token of a random prompt, with an objective or without."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=self._rng.choices(range(self._vocabulary), k=tokens))
        job = JobId(f"job-{next(self._numbers)}")
        arrived_s = time.monotonic()
        deadline_s = NO_DEADLINE if ttft_s is None else arrived_s + ttft_s
        arguments: dict[str, Any] = {
            JOB_XARG: job,
            WEIGHT_XARG: _WEIGHT,
            TIER_XARG: STANDARD,
            ARRIVED_XARG: arrived_s,
            PREDICTOR_XARG: self.predictor.encode(),
        }
        if self.governor is not None and (bound := self.governor.profile.bound) is not None:
            arguments[STOP_BOUND_XARG] = bound.encode()
        if ttft_s is not None:
            arguments[DEADLINE_XARG] = deadline_s
        sampling = SamplingParams(
            max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, extra_args=arguments
        )
        with self._followed(Accepted(job, STANDARD, tokens, deadline_s, arrived_s)):
            async for _ in self.engine.generate(prompt, sampling, job):
                pass
            return time.monotonic() - arrived_s

    async def measure(self, lengths: tuple[int, ...]) -> None:
        """Learn what a prefill takes, as a server does: after one of each length, from the shorter of two."""
        for tokens in lengths:
            await self.prefill(tokens)
        times_s = [min(await self.prefill(tokens), await self.prefill(tokens)) for tokens in lengths]
        self.predictor = fit([*map(Sample, lengths, times_s)], has_floor=True).predictor

    async def govern(self, board: Board, setup: EngineSetup, *, on_host: bool) -> None:
        """Put the governor before the engine.

        Raises:
            RuntimeError: when the engine's passes cannot stop.
        """
        answers = await self.engine.collective_rpc("preemption_support")
        support = PreemptionSupport(*answers[0])
        if not support.done:
            raise RuntimeError(f"this engine's passes cannot stop: {support.why_not}")
        ahead_s = 0.0 if on_host else setup.launch_ahead_s
        kept_bytes, *_ = await self.engine.collective_rpc("kept_bytes")
        profile = ForwardProfile(support.shape(), tuple(kept_bytes), ahead_s, setup.stop_within_s)
        ledger = PrefillLedger(self.predictor)
        self.governor = Governor(
            ledger,
            dict.fromkeys(DEFAULT_TIERS, _WEIGHT),
            PreemptionRules(),
            QueueOrder(setup.order),
            profile,
            setup.fairness(),
        )
        self._record = PreemptionRecord(self.tally, ledger)  # type: ignore[arg-type] # it has what is used
        self._watch = Watch(board, self.governor, self._record)
        self.granularity = support.granularity

    @property
    def is_governed(self) -> bool:
        """Whether stops are decided and the governor has not failed."""
        return self._watch is not None and self._watch.is_up

    def collect(self) -> None:
        """Take in what the engine has reported."""
        if self._watch is not None:
            self._watch.collect()

    def close(self) -> None:
        """Stop the governor."""
        if self._watch is not None:
            self._watch.close()

    @contextmanager
    def _followed(self, accepted: Accepted) -> Iterator[None]:
        """Tell the governor of a job that arrives, and of its end."""
        governor, watch, record = self.governor, self._watch, self._record
        if governor is None or watch is None or record is None:
            yield
            return
        governor.arrived(accepted, accepted.arrived_s)
        record.follow(accepted.job_id, JobSpans("", accepted.arrived_s))
        watch.changed()
        try:
            yield
        finally:
            governor.ledger.ended(accepted.job_id)
            watch.changed()
            record.leave(accepted.job_id)


@asynccontextmanager
async def governed_engine(
    arm: EngineArm, model: Path, setup: EngineSetup, warm_up_tokens: tuple[int, ...], *, seed: int = 0
) -> AsyncIterator[GovernedEngine]:
    """Start an engine with dummy weights, measure it with these lengths, and govern it if it is ours.

    `model` is a directory with a `config.json`.
    """
    import torch
    from vllm.config import CompilationMode

    is_gpu = torch.cuda.is_available()
    config = json.loads((model / "config.json").read_text())
    longest = config["max_position_embeddings"]
    options: dict[str, Any] = {}
    if not arm.as_shipped:
        options["max_num_batched_tokens"] = min(longest, arm.chunk_tokens or longest)
        options["enforce_eager"] = not (arm.is_compiled or arm.in_graphs)
        if arm.in_graphs:
            options["compilation_config"] = {"mode": CompilationMode.NONE, "cudagraph_mode": "FULL"}
    with async_engine(
        model,
        setup=setup if arm.is_ours else None,
        worker_cls=None if arm.as_shipped else BAREABLE_WORKER,
        is_gpu=is_gpu,
        as_shipped=arm.as_shipped,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=longest,
        **options,
    ) as (engine, board):
        running = GovernedEngine(engine, arm, config["vocab_size"], seed)
        try:
            await running.measure(warm_up_tokens)
            if board is not None:
                await running.govern(board, setup, on_host=not is_gpu)
            yield running
        finally:
            running.close()


def write_model(directory: Path, shape: ModelShape, vocabulary: int, longest: int) -> Path:
    """The `config.json` of a Llama of some shape; its weights are dummies."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": longest,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(values, indent=2))
    return directory
