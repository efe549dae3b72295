"""Decode engines on this machine whose steps this process takes one by one and times.

A real engine on CPU with a small random model. Requests of three tiers come in bursts; what each will answer
is drawn and known to no scheduler, each may have 1,024 tokens. Does not choose what is compared, nor the
figures of a run.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Final

import numpy as np

from benchmarks.harness.bursts import Phase, bursty
from benchmarks.harness.offline_engine import stepped_engine
from slo.request import FIRST_DUE_XARG, TIER_XARG, TPOT_XARG

BLOCK: Final = 32
AMPLE_BLOCKS: Final = 4096
MAX_TOKENS: Final = 1024
CONTEXT: Final = 2048
PREMIUM, STANDARD, BACKGROUND = "premium", "standard", "background"
RANKS: Final = {PREMIUM: 0, STANDARD: 1, BACKGROUND: 2}
"""vLLM's priorities: the lowest number first."""
ENGINE: Final = {
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": 1024,
    "long_prefill_token_threshold": 128,
    "block_size": BLOCK,
    "enable_prefix_caching": True,
}
"""Options of the engine in every arm."""
STEP_TIMES: Final = ("step fixed s", "step stream s", "step prompt token s")
"""Seconds of a step for itself, for each stream in it, and for each token of prompts in it."""
BURST: Final = Phase(2.5, 3.0)
LULL: Final = Phase(0.4, 5.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of a tier.

    Attributes:
        part: Of all requests.
        prompt: Tokens, from and to.
        answer: Median of its tokens, lognormal with sigma 0.7.
        ttft_s: Objectives, seconds; none for the background.
    """

    part: float
    prompt: tuple[int, int]
    answer: int
    ttft_s: float | None
    tpot_s: float | None


KINDS: Final = {
    PREMIUM: Kind(0.3, (32, 128), 60, 0.5, 0.030),
    STANDARD: Kind(0.4, (64, 256), 150, 2.0, 0.060),
    BACKGROUND: Kind(0.3, (64, 256), 400, None, None),
}
"""What is asked for where a command has no kinds of its own."""


@dataclass(slots=True)
class Asked:
    """One request and what became of it; times in seconds from the beginning of the run."""

    name: str
    tier: str
    at_s: float
    prompt: list[int]
    answer: int
    token_s: list[float] = field(default_factory=list)
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run the engine.

    Attributes:
        tells_tpot: Whether the engine is told the TPOT objectives; only ours listens.
    """

    name: str
    blocks: int
    options: dict[str, Any]
    tells_tpot: bool = True


def arrivals(seconds: float, rate_rps: float, seed: int, kinds: Mapping[str, Kind] = KINDS) -> list[Asked]:
    """Requests in bursts and lulls."""
    rng = Random(seed)
    found: list[Asked] = []
    for now_s in bursty(rng, rate_rps, seconds, BURST, LULL):
        tier = rng.choices([*kinds], [kind.part for kind in kinds.values()])[0]
        kind = kinds[tier]
        prompt = [rng.randrange(250) for _ in range(rng.randint(*kind.prompt))]
        answer = max(2, min(MAX_TOKENS - 1, round(kind.answer * rng.lognormvariate(0.0, 0.7))))
        found.append(Asked(f"{tier}-{len(found)}", tier, now_s, prompt, answer))
    return found


class Observer:
    """Counts what a scheduler has computed, and computed again; ends answers where they were drawn to end."""

    def __init__(self, scheduler: Any, asked: Mapping[str, Asked]) -> None:
        from vllm.v1.core.sched import scheduler as module
        from vllm.v1.request import RequestStatus

        self._asked = asked
        self._most: dict[str, int] = {}
        self.computed = self.again = self.steps = 0
        self.fullest = 0.0
        self._composed = 0, 0
        self.timed: list[tuple[int, int, float]] = []
        schedule, check_stop = scheduler.schedule, module.check_stop
        preempt = scheduler._preempt_request  # noqa: SLF001 - who is preempted is said nowhere else
        usage = scheduler.kv_cache_manager

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for name, new in output.num_scheduled_tokens.items():
                end = scheduler.requests[name].num_computed_tokens
                before = self._most.get(name, 0)
                self.computed += new
                self.again += max(0, min(before, end) - (end - new))
                self._most[name] = max(before, end)
            self.steps += bool(output.num_scheduled_tokens)
            ones = [*output.num_scheduled_tokens.values()].count(1)
            self._composed = ones, output.total_num_scheduled_tokens - ones
            self.fullest = max(self.fullest, usage.usage)
            return output

        def preempted(request: Any, *args: Any, **kwargs: Any) -> None:
            self._of(request).preemptions += 1
            preempt(request, *args, **kwargs)

        def ends(request: Any, max_model_len: int) -> bool:
            if request.num_output_tokens >= self._of(request).answer:
                request.status = RequestStatus.FINISHED_STOPPED
                return True
            return bool(check_stop(request, max_model_len))

        scheduler.schedule, scheduler._preempt_request = counted, preempted  # noqa: SLF001
        module.check_stop = ends

    def took(self, seconds: float) -> None:
        """The step composed last took so long, from before it was composed to the tokens' texts."""
        self.timed.append((*self._composed, seconds))

    def _of(self, request: Any) -> Asked:
        # vLLM adds a suffix of its own to each name.
        return self._asked["-".join(request.request_id.split("-")[:2])]


def run(model: str, arm: Arm, asked: list[Asked], kinds: Mapping[str, Kind] = KINDS) -> dict[str, Any]:
    """Serve all of `asked` with one engine; what came of it."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    options = {**ENGINE, "num_gpu_blocks_override": arm.blocks + 1, **arm.options}
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"  # for the arm with our connector
    by_name = {one.name: one for one in asked}
    with stepped_engine(model, **options) as llm:
        engine = llm.llm_engine
        warm_up(llm)
        observer = Observer(engine.engine_core.engine_core.scheduler, by_name)
        due = [(one.at_s, one.name) for one in asked]
        heapq.heapify(due)
        started_s, started_at_s = time.perf_counter(), time.monotonic()
        while due or engine.has_unfinished_requests():
            now_s = time.perf_counter() - started_s
            if not engine.has_unfinished_requests() and due[0][0] > now_s:
                time.sleep(due[0][0] - now_s)
                continue
            while due and due[0][0] <= now_s:
                one = by_name[heapq.heappop(due)[1]]
                kind = kinds[one.tier]
                extra: dict[str, Any] = {TIER_XARG: one.tier}
                if kind.tpot_s is not None and arm.tells_tpot:
                    extra[TPOT_XARG] = kind.tpot_s
                if kind.ttft_s is not None:  # decode samples all first tokens here
                    extra[FIRST_DUE_XARG] = started_at_s + one.at_s + kind.ttft_s
                engine.add_request(
                    one.name,
                    TokensPrompt(prompt_token_ids=one.prompt),
                    SamplingParams(
                        max_tokens=MAX_TOKENS,
                        temperature=0,
                        ignore_eos=True,
                        extra_args=extra,
                        output_kind=RequestOutputKind.DELTA,
                    ),
                    priority=RANKS[one.tier] if arm.options.get("scheduling_policy") == "priority" else 0,
                )
            outputs, ended_s = engine.step(), time.perf_counter() - started_s
            observer.took(ended_s - now_s)
            for output in outputs:
                by_name[output.request_id].token_s += [ended_s] * len(output.outputs[0].token_ids)
        took_s = time.perf_counter() - started_s
    assert all(len(one.token_s) == one.answer for one in asked), "an answer has another length"
    return {
        "took_s": took_s,
        "steps": observer.steps,
        "computed": observer.computed,
        "again": observer.again,
        "fullest": observer.fullest,
        "step_times": step_times(observer.timed),
        "asked": [asdict(one) | {"prompt": len(one.prompt)} for one in asked],
    }


def step_times(timed: Sequence[tuple[int, int, float]]) -> dict[str, float]:
    """`STEP_TIMES` by least squares over steps, each with its streams, its tokens of prompts and its seconds.

    One in a hundred, those that took longest, is left out: another process had the core.
    """
    steps = np.array([one for one in timed if one[0] + one[1]])
    steps = steps[steps[:, 2] <= np.quantile(steps[:, 2], 0.99)]
    composed = np.column_stack([np.ones(len(steps)), steps[:, :2]])
    found, *_ = np.linalg.lstsq(composed, steps[:, 2], rcond=None)
    return dict(zip(STEP_TIMES, found.tolist(), strict=True))


def warm_up(llm: Any) -> None:
    """Let the engine compute once what it will compute, so that the first requests are no slower."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    rng = Random(0)
    prompts = [TokensPrompt(prompt_token_ids=[rng.randrange(250) for _ in range(200)]) for _ in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), use_tqdm=False)
    llm.reset_prefix_cache()


def met(one: Mapping[str, Any], kind: Kind) -> bool:
    """Whether a request met its objectives."""
    ttft_s = one["token_s"][0] - one["at_s"]
    return ttft_s <= (kind.ttft_s or math.inf) and tpot_of(one) <= (kind.tpot_s or math.inf)


def tpot_of(one: Mapping[str, Any]) -> float:
    """Its mean time per output token after the first, seconds."""
    tokens = one["token_s"]
    return float((tokens[-1] - tokens[0]) / max(1, len(tokens) - 1))


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What a result says of how it was measured."""
    return vars(given) | {"engine": ENGINE, "kinds": {tier: asdict(kind) for tier, kind in KINDS.items()}}


def mean(rows: list[dict[str, Any]], *same: str) -> dict[str, Any]:
    """The mean of each figure; what is the `same` in all rounds is kept."""
    figures = [key for key in rows[0] if key not in (*same, "round")]
    return {key: rows[0][key] for key in same} | {
        key: statistics.fmean(row[key] for row in rows) for key in figures
    }
