"""What a request is promised, and what its way will take.

Owns the terms of a request, and what is learned for them from requests that ended: how long the way to the
first token is besides queue and prefill, and how long answers become. Whether a request is placed on its
terms is `router.core`'s to decide. Pure, like `router.core`; all times are seconds on the router's monotonic
clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.fleet.decode_replica import DecodeView, Newcomer
from router.fleet.prefill_replica import PrefillView
from router.lone_prefills import ExpectedStop, Guess, LonePrefills
from router.messages import JobEnded, PlacementRequested
from router.placement.policies import Choice
from slo.decode.output_length import FIRST_GUESS, OutputLengths
from slo.objectives import Alone
from slo.predict.path_time import PathTime
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.slack import NO_DEADLINE
from slo.reports import PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import ObjectiveName, Tier, TierPolicy


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A request that asks for a place, and the replicas in question.

    Attributes:
        newcomer: What it is to decode; its tokens are those of all its prompts, as far as they are known.
        cached: Of these tokens, those that prefill replicas are expected to have cached.
        prefill: The replicas that may prefill it; none where decode has to.
        decode: The replica that would decode it.
    """

    request: PlacementRequested
    newcomer: Newcomer
    cached: Mapping[ReplicaId, int]
    prefill: Sequence[PrefillView]
    decode: DecodeView
    now_s: float

    @property
    def tokens(self) -> int:
        """Of its prompts together."""
        return self.newcomer.tokens

    @property
    def max_cached(self) -> int:
        """The most tokens that one of its replicas has cached; of others that are known nothing counts."""
        if not self.cached:
            return 0
        return max((self.cached.get(one.replica_id, 0) for one in self.prefill), default=0)

    @property
    def fastest(self) -> PrefillPredictor:
        """Of the replicas that may prefill it, the one that would take the least; there must be one."""
        return min(self.prefill, key=lambda one: one.predictor.prefill_s(self.tokens)).predictor


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request is promised.

    Attributes:
        budget_s: For its first token, from arrival; None for no deadline.
        promised_s: What it was promised for that; None for nothing.
        deadline_s: When its prefill must end, infinite for never.
        latest_s: When its prefill must end lest it be rejected; infinite when it never is.
        held_to_s: The budget for its first token that a rejection names.
        is_in_reach: Whether an idle fleet could have the first token within what a rejection holds it to.
        unattainable: See `router.messages.Placed`.
        unattainable_if_refused: See `slo.errors.Rejected`.
    """

    arrived_s: float
    budget_s: float | None = None
    promised_s: float | None = None
    deadline_s: float = NO_DEADLINE
    latest_s: float = NO_DEADLINE
    held_to_s: float | None = None
    is_in_reach: bool = True
    unattainable: tuple[ObjectiveName, ...] = ()
    unattainable_if_refused: tuple[ObjectiveName, ...] = ()

    def slack_s(self, predicted_s: float) -> float:
        """The budget minus what is predicted; infinite without a deadline."""
        return math.inf if self.budget_s is None else self.budget_s - predicted_s


class Promises:
    """Works out terms, by what requests that ended have taught.

    Args:
        policies: Objectives of each tier, and whether it may be shed.
        stretch: See `router.fleet.view.RouterLimits`.
    """

    def __init__(self, policies: Mapping[Tier, TierPolicy], stretch: float) -> None:
        self._policies = policies
        self._stretch = stretch
        self._path = PathTime()
        self._path_by_decode = PathTime()
        """Of requests whose first token decode samples."""
        self._lone = LonePrefills()
        self._answers = OutputLengths()

    # What it is told.

    def placed(self, inquiry: Inquiry, choice: Choice, wait_s: float) -> None:
        """A request was placed; its first token may say how long the way takes (`tells_the_way`).

        `wait_s` are the seconds that it waits for decode's memory.
        """
        request, now_s = inquiry.request, inquiry.now_s
        job_id, where = request.job_id, choice.replica.replica_id
        if tells_the_way(request, choice, wait_s):
            self._path_of(request).placed(job_id, choice.end_s - (now_s - request.elapsed_s), now_s)
            predictor = choice.replica.predictor
            start_by_s = choice.start_s + predictor.handoff_s
            stop = None if choice.stops is None else ExpectedStop(choice.stops, start_by_s)
            text = None if request.prompt_tokens is not None else (request.tenant, request.prompt_bytes)
            guess = Guess(predictor, inquiry.tokens, inquiry.cached.get(where, 0), text)
            if (before := self._lone.goes_first(job_id, where, choice.end_s, stop, guess)) is not None:
                self.forget(before)
        else:
            self._lone.followed(job_id, where, now_s)

    def prefill_reported(self, event: PrefillReported, now_s: float) -> None:
        """A prefill that was held up where nothing seemed to be in its way says nothing of the way.

        Nor does what it takes longer as there is more of it than was guessed.
        """
        corrected = self._lone.corrected(event)
        for path in (self._path, self._path_by_decode):
            path.forget_old(now_s)
            if corrected is not None:
                path.corrected(*corrected)
        if (held_up := self._lone.reported(event, now_s)) is not None:
            self.forget(held_up)

    def ended(self, ended: JobEnded) -> None:
        """Learn from a request that is over."""
        ttft_s = ended.ttft_s if self._lone.over(ended.job_id) else None
        for path in (self._path, self._path_by_decode):
            path.ended(ended.job_id, ttft_s)
        if (answered := ended.answered) is not None:
            self._answers.ended(answered.tier, answered.tenant, answered.tokens)

    def forget(self, job_id: JobId) -> None:
        """Nothing is to be learned from a request."""
        self.ended(JobEnded(job_id))

    # What it says.

    def terms(self, inquiry: Inquiry, memory_s: float) -> Terms:
        """What a request is promised; the whole of it is known only where there is a prefill replica.

        `memory_s` are the seconds until decode has memory for it.
        """
        request, objective = inquiry.request, inquiry.request.objective
        arrived_s = inquiry.now_s - request.elapsed_s
        if not inquiry.prefill:
            return Terms(arrived_s, objective.known_ttft_budget_s, objective.ttft_s)
        alone, handoff_s = self._alone(inquiry)
        unattainable = objective.out_of_reach(alone)
        # What is left of the wait for decode's memory comes after a first token that prefill samples.
        wait_s = 0.0 if request.decode_samples_first else max(0.0, memory_s - alone.prefill_s)
        budget_s = objective.ttft_budget_s(alone.prefill_s, self._rest_s(inquiry, wait_s))
        if budget_s is None:
            return Terms(arrived_s, unattainable=unattainable, unattainable_if_refused=unattainable)
        promised_s = objective.promised_ttft_s(alone.prefill_s)
        path_s = self.path_s(request, handoff_s)
        deadline_s = latest_s = arrived_s + budget_s - path_s
        held_to_s = budget_s
        reach_s = objective.ttft_budget_s(alone.prefill_s, alone.e2e_s - alone.ttft_s) or budget_s
        if request.however_late or request.only_decode or not self._policies[objective.tier].sheddable:
            latest_s = reach_s = NO_DEADLINE
        elif not request.explicit_deadline:
            allowed_s = max(budget_s, self._stretch * (alone.prefill_s + path_s))
            if request.explicit_e2e_s is not None and request.explicit_e2e_s < allowed_s:
                allowed_s = held_to_s = request.explicit_e2e_s
            latest_s = arrived_s + allowed_s - path_s
            reach_s = max(reach_s, allowed_s)
        if not (is_in_reach := alone.ttft_s <= reach_s):
            alone = alone._replace(ttft_s=math.inf, tpot_s=math.inf, e2e_s=math.inf)
        return Terms(
            arrived_s,
            budget_s,
            promised_s,
            deadline_s,
            latest_s,
            held_to_s,
            is_in_reach=is_in_reach,
            unattainable=unattainable,
            unattainable_if_refused=objective.out_of_reach(alone),
        )

    def awaits_stop(self, where: ReplicaId) -> bool:
        """Whether a replica was to stop something for a request that may teach the way, and still has it."""
        return self._lone.has_stop(where)

    def path_s(self, request: PlacementRequested, handoff_s: float) -> float:
        """Predicted seconds from arrival to the first token, but for queue and prefill.

        `handoff_s` is what they are while nothing is known.
        """
        return self._path_of(request).seconds(handoff_s)

    def pace_s(self, request: PlacementRequested) -> float | None:
        """The seconds per output token that a request's objectives leave; None for any."""
        objective = request.objective
        if objective.e2e_s is None:
            return objective.tpot_s
        left_s = objective.e2e_s / max(1, self.answer_tokens(request))
        return left_s if objective.tpot_s is None else min(objective.tpot_s, left_s)

    def most_output(self, request: PlacementRequested) -> int:
        """The most tokens that memory is to be there for beyond those that are prefilled; 0 leaves that open.

        An answer that goes on after a loss has no more to come than those that became longer than it is.
        """
        if not (emitted := request.answered_tokens):
            return request.output_tokens
        most = request.output_tokens - emitted if request.output_tokens else FIRST_GUESS
        return max(1, self._answers.expected(request.objective.tier, request.tenant, emitted, most))

    def answer_tokens(self, request: PlacementRequested) -> int:
        """How many tokens one of its answers is expected to have."""
        most = request.output_tokens // request.answers or FIRST_GUESS
        return self._answers.whole(request.objective.tier, request.tenant, most)

    def _alone(self, inquiry: Inquiry) -> tuple[Alone, float]:
        """What a request takes on an idle fleet, and the handoff of the replica that is fastest there."""
        request, tokens, idle = inquiry.request, inquiry.tokens, inquiry.fastest
        first_s = prefill_s = request.prompts * idle.prefill_s(tokens // request.prompts)
        for one in inquiry.prefill if inquiry.cached else ():
            if (there := inquiry.cached.get(one.replica_id, 0)) > 0:
                first_s = min(first_s, one.predictor.prefill_s(tokens - there, there))
        ttft_s = first_s + self._path_of(request).least_s(idle.handoff_s)
        tpot_s = inquiry.decode.alone_s(inquiry.now_s)
        e2e_s = ttft_s + tpot_s * max(0, self.answer_tokens(request) - 1)
        return Alone(prefill_s, ttft_s, tpot_s, e2e_s), idle.handoff_s

    def _rest_s(self, inquiry: Inquiry, wait_s: float) -> float:
        """Predicted seconds from the first token of an answer to its last; 0 when nobody asks.

        `wait_s` of them pass before the second token.
        """
        objective, decode = inquiry.request.objective, inquiry.decode
        if objective.e2e_s is None:
            return 0.0
        pace_s = decode.tpot_s(decode.streams_with(inquiry.newcomer.rank) + 1, inquiry.now_s)
        if pace_s is None:
            pace_s = objective.tpot_s or 0.0
        return wait_s + pace_s * max(0, self.answer_tokens(inquiry.request) - 1)

    def _path_of(self, request: PlacementRequested) -> PathTime:
        return self._path_by_decode if request.decode_samples_first else self._path


def tells_the_way(request: PlacementRequested, choice: Choice, wait_s: float) -> bool:
    """Whether nothing holds a request up, so that its first token will say how long the way takes.

    Its replica is idle, or stops for it what runs there.

    `wait_s` are the seconds that it waits for decode's memory.
    """
    is_first = choice.stops is not None or not choice.replica.jobs
    return is_first and wait_s == 0 and not request.is_admitted
