"""vLLM's scheduler with the prefill queue in order of slack.

Runs in the EngineCore process. Owns the order of the waiting queue, how far down it one step reaches, and
the release of KV blocks that nobody will pull. Everything else is vLLM's scheduler. Stopping a running
forward pass is not done here yet: `schedule` is where a suspended step would be issued again.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from slo.batching import Candidate, compose_step
from slo.predictor import PrefillPredictor
from slo.request import DEADLINE_XARG, JOB_XARG, PREDICTOR_XARG
from slo.slack import NO_DEADLINE, SlackRank, sedf_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request, RequestStatus

RELEASE_PREFIX = "slackserve-release:"
"""An abort of this prefix plus a job id gives up the job, whether it still runs or waits to be pulled."""


class SlackScheduler(Scheduler):  # type: ignore[misc] # vLLM ships no types for it
    """Prefills the request with the least slack first (S-EDF), alone or with those it can afford."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._predictor = PrefillPredictor(0.0, 0.0)
        self._jobs: dict[str, str] = {}

    def add_request(self, request: Request) -> None:
        """Queue a request; it brings its job and the replica's latest predictor."""
        super().add_request(request)
        if (job := _argument(request, JOB_XARG)) is not None:
            self._jobs[job] = request.request_id
        if (line := _argument(request, PREDICTOR_XARG)) is not None:
            self._predictor = PrefillPredictor(*line)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Compose the next step from the front of the slack-ordered queue."""
        held = self._hold_back(time.monotonic())
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.waiting.extend(held)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Abort requests, and give up jobs named with `RELEASE_PREFIX`."""
        if request_ids is None:
            return list(super().finish_requests(None, finished_status))
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        plain = [request_id for request_id in ids if not request_id.startswith(RELEASE_PREFIX)]
        for request_id in ids:
            if request_id.startswith(RELEASE_PREFIX):
                engine_id = self._jobs.get(request_id.removeprefix(RELEASE_PREFIX))
                if engine_id is not None and not self._end_lease(engine_id):
                    plain.append(engine_id)
        return list(super().finish_requests(plain, finished_status))

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        if (job := _argument(request, JOB_XARG)) is not None:
            self._jobs.pop(job, None)

    def _end_lease(self, engine_id: str) -> bool:
        """Whether the request was finished and waiting to be pulled; if so its lease ends now."""
        request = self.requests.get(engine_id)
        if request is None or not request.is_finished():
            return False
        self.connector.release(engine_id)
        return True

    def _hold_back(self, now_s: float) -> deque[Request]:
        """Sort the queue by slack and take out what shall not share the next step."""
        if len(self.waiting) < 2:  # noqa: PLR2004 - nothing to order
            return deque()
        ordered = sorted(self.waiting, key=lambda request: self._rank(request, now_s))
        candidates = [Candidate(_tokens_left(request), _deadline_s(request)) for request in ordered]
        budget = self.scheduler_config.max_num_batched_tokens
        step = compose_step(candidates, now_s, self._predictor, budget)
        self.waiting.clear()
        self.waiting.extend(ordered[: step.size])
        return deque(ordered[step.size :])

    def _rank(self, request: Request, now_s: float) -> SlackRank:
        remaining_s = self._predictor.prefill_s(_tokens_left(request))
        return sedf_rank(_deadline_s(request), now_s, remaining_s, request.arrival_time)


def _tokens_left(request: Request) -> int:
    return int(request.num_tokens - request.num_computed_tokens)


def _deadline_s(request: Request) -> float:
    deadline_s = _argument(request, DEADLINE_XARG)
    return NO_DEADLINE if deadline_s is None else float(deadline_s)


def _argument(request: Request, name: str) -> Any:
    sampling = request.sampling_params
    return None if sampling is None or sampling.extra_args is None else sampling.extra_args.get(name)
