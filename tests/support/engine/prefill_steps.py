"""A prefill engine's scheduler, stepped without a model, in a time of its own."""

from __future__ import annotations

import math

from real_schedulers import BLOCK, Pages, build
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from prefill_node.engine.scheduler import SlackScheduler
from prefill_node.engine_setup import EngineSetup
from prefill_node.step_order import PreemptedOutput, StepOrder
from slo.predict.pass_shape import PassPart
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.chunks import StopBound
from slo.request import (
    ARRIVED_XARG,
    DEADLINE_XARG,
    JOB_XARG,
    PREDICTOR_XARG,
    STOP_BOUND_XARG,
    TIER_XARG,
    WEIGHT_XARG,
)

LINE = PrefillPredictor(per_token_s=1e-5, fixed_s=1e-4)
BOUNDARIES = 10


def resuming(model):
    """A scheduler of steps that can be stopped, with memory for all."""
    setup = EngineSetup(mode="resume", arrival_wait_s=0.0)
    return build(SlackScheduler, model, 400, chunk=0, additional=setup.encode())


class PrefillSteps:
    """A scheduler whose steps a test takes one at a time."""

    def __init__(self, scheduler, clock, *, places=math.inf, window=0):
        init_none_hash(sha256)
        self.scheduler, self.clock = scheduler, clock
        self.pages = Pages(places, window)
        self.checkpoints = {}
        self.finished, self.aborted = [], []
        self.restored = 0
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def add(self, name, tokens, *, due_s=None, weight=1.0, tier="standard", chunk=None, extra=None):
        """A request for these tokens, due in so many seconds; with `chunk` steps have so many tokens.

        It brings these `extra` arguments along.
        """
        now_s = self.clock.now_s
        given = {JOB_XARG: name, WEIGHT_XARG: weight, TIER_XARG: tier, ARRIVED_XARG: now_s}
        given[PREDICTOR_XARG] = LINE.encode()
        if due_s is not None:
            given[DEADLINE_XARG] = now_s + due_s
        if chunk is not None:
            bound = StopBound(LINE.pass_s(chunk + 1, 0.0), (PassPart(1.0, 0.0),))
            given[STOP_BOUND_XARG] = bound.encode()
        given |= extra or {}
        params = SamplingParams(max_tokens=1, ignore_eos=True, extra_args=given)
        self.scheduler.add_request(Request(name, tokens, params, None, block_hasher=self._hasher))

    def step(self, stops_at=None, meanwhile=lambda: None):
        """One step, which stops at a boundary if one is given; `meanwhile` happens while it runs."""
        output = self.scheduler.schedule()
        ran = self._run(output, stops_at)
        meanwhile()
        for outputs in self.scheduler.update_from_output(output, ran).values():
            self.finished += [one.request_id for one in outputs.outputs if one.finish_reason is not None]
        return output

    def finish(self, within=2000):
        """Step until all have ended, each once, and nothing is left of any."""
        scheduler = self.scheduler
        for _ in range(within):
            if not scheduler.requests:
                break
            if not self.step().total_num_scheduled_tokens:
                self.clock.now_s += 0.01
        assert not scheduler.requests, "somebody never ended"
        assert sorted(self.finished) == sorted(set(self.finished))
        self.step()
        assert not self.pages.rows
        assert not self.checkpoints
        assert scheduler.kv_cache_manager.usage == 0.0
        suspensions, stepper = scheduler._suspensions, scheduler._stepper
        queues = (scheduler.running, scheduler.waiting, scheduler.skipped_waiting)
        books = (
            suspensions.steps,
            suspensions.accounts,
            stepper.jobs,
            scheduler._wasted._hit_tokens,
            scheduler._wasted._left,
        )
        assert not any(queues)
        assert not any(books)

    def _run(self, output, stops_at):
        self.pages.take(output)
        order, rows = StepOrder.of(output), output.num_scheduled_tokens
        for step in order.discard:
            self.checkpoints.pop(step, None)
        if order.resume is not None:
            kept = self.checkpoints.pop(order.resume)
            assert rows.items() <= kept.items(), "the step is not the one that was stopped"
            self.restored += 1
        self.clock.now_s += LINE.pass_s(sum(rows.values()), 0.0) if rows else 0.0
        stops = bool(rows) and stops_at is not None
        for name, tokens in rows.items():
            self._compare_blocks(name)
            self.pages.read(name)
            self.pages.write(name, tokens, complete=not stops)
        if stops:
            return self._stopped(order.step_id, dict(rows), stops_at)
        names = [*rows]
        is_done = [row.computed == len(row.prefixes) for row in map(self.pages.rows.get, names)]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[5] if done else [] for done in is_done],
        )

    def _compare_blocks(self, name):
        """To the scheduler the request has the same blocks, but for those that a window has left behind."""
        held = self.scheduler.kv_cache_manager.get_blocks(name).blocks
        for group, blocks in zip(held, self.pages.rows[name].blocks, strict=True):
            for block, number in zip(group, blocks, strict=True):
                assert block.is_null or block.block_id == number

    def _stopped(self, step_id, rows, boundary):
        part = PassPart(boundary / BOUNDARIES, boundary / BOUNDARIES)
        if boundary:
            self.checkpoints[step_id] = rows
        return PreemptedOutput(
            req_ids=[],
            req_id_to_index={},
            boundary=boundary,
            boundaries=BOUNDARIES,
            computed=part,
            resumes_at=boundary,
            done=part,
            is_kept=boundary > 0,
            checkpoint_bytes=1000 * boundary,
            stopped_s=self.clock.now_s,
        )
