"""One request on its way through the simulated servers, and what has become of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from simulator.findings import State
from simulator.workload.arrivals import Arrival
from slo.queue.slack import NO_DEADLINE
from slo.request import ARRIVED_XARG, CACHED_XARG, DEADLINE_XARG, JOB_XARG, TIER_XARG, WEIGHT_XARG, JobId


class Sampling(msgspec.Struct, frozen=True):
    """What a replica sends along with a request, where vLLM's requests have it."""

    extra_args: dict[str, Any]


@dataclass(slots=True, eq=False)
class Job:
    """A request, with the attributes by which `prefill_node.engine.queue` reads vLLM's.

    Attributes:
        deadline_s: When its prefill must end; infinite for never.
        handoff_s: From the end of prefill to the first token.
        cached_tokens: Prompt tokens that the prefix cache is expected to hold when it starts.
        hit_tokens: Prompt tokens that it held.
        num_tokens: Prompt tokens, and so are `num_prompt_tokens`.
        num_computed_tokens: Prompt tokens whose KV is there, those of the running step included.
        first_token_s: When its first token was there; infinite before that, and if it was refused.
        chunks_s: Device time of its chunks that have ended.
        wasted_s: Device time of work that had to be done again.
        history: State changes and their times, kept for timelines only.
    """

    arrival: Arrival
    weight: float
    deadline_s: float
    handoff_s: float = 0.0
    request_id: str = field(init=False)
    job_id: JobId = field(init=False)
    sampling_params: Sampling = field(init=False)
    num_tokens: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    arrival_time: float = field(init=False)
    cached_tokens: int = 0
    hit_tokens: int = 0
    num_computed_tokens: int = 0
    blocks: int = 0
    started: bool = False
    prefilled_s: float = math.inf
    first_token_s: float = math.inf
    refused: str = ""
    preemptions: int = 0
    chunks_s: float = 0.0
    wasted_s: float = 0.0
    history: list[tuple[State, float]] | None = None

    def __post_init__(self) -> None:  # noqa: D105 - gives it its names
        self.request_id = str(self.arrival.number)
        self.job_id = JobId(self.request_id)
        self.num_tokens = self.num_prompt_tokens = self.arrival.tokens
        self.arrival_time = self.arrival.at_s
        arguments: dict[str, Any] = {
            JOB_XARG: self.request_id,
            WEIGHT_XARG: self.weight,
            TIER_XARG: self.arrival.tier,
            ARRIVED_XARG: self.arrival.at_s,
        }
        if self.deadline_s < NO_DEADLINE:
            arguments[DEADLINE_XARG] = self.deadline_s
        self.sampling_params = Sampling(arguments)

    def expect_cached(self, tokens: int) -> None:
        """So much of the prompt is expected to be in the prefix cache."""
        self.cached_tokens = tokens
        self.sampling_params.extra_args[CACHED_XARG] = tokens

    def is_finished(self) -> bool:
        """Whether its prefill has ended."""
        return self.prefilled_s < math.inf

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival.at_s

    @property
    def is_on_time(self) -> bool:
        """Whether its first token met its objective; always, if it has none and was served."""
        objective_s = self.arrival.ttft_s
        return self.ttft_s < math.inf if objective_s is None else self.ttft_s <= objective_s

    def enter(self, state: State, now_s: float) -> None:
        """Note a change of state, if anybody wants to see it."""
        if self.history is not None and (not self.history or self.history[-1][0] is not state):
            self.history.append((state, now_s))
