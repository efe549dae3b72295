"""A decode engine under pressure between its clients and the prefill tier, in a time of its own.

The scheduler, its KV memory and its connector are real. Played are the workers, who move blocks to host
memory and back, pull others and compute, the prefill tier, and the clients, whose answers go on in a new
attempt whenever their stream has left or has not got its KV.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from decode_steps import check_blocks
from real_schedulers import BLOCK, Pages, prefixes
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from decode_node.requests.dropping import DROPPED
from decode_node.requests.leaving import LEFT
from kv_transfer.swap.host_blocks import SwapSpeed
from sampling.carried import CARRIED_XARG, KV_PARAMS
from slo.request import JOB_XARG

NOTHING = (None,) * BLOCK
PREFILL = {"remote_engine_id": "prefill", "remote_host": "localhost", "remote_port": 1, "tp_size": 1}


@dataclass
class Job:
    """An answer that a client waits for, over all attempts at it.

    Attributes:
        name: The router's name for it.
        prompt: Its tokens.
        max_tokens: After so many it ends.
        xargs: What the scheduler is told of it.
        tokens: What its client has got.
        attempt: The engine's name for it; None while it is not there.
        end: How it has ended; None before that.
    """

    name: str
    prompt: list[int]
    max_tokens: int
    xargs: dict
    tokens: list[int] = field(default_factory=list)
    attempt: str | None = None
    end: str | None = None


@dataclass
class Pull:
    """KV on its way into blocks, each of which gets its part of `kv`; after so many steps it is there."""

    blocks: list[int]
    kv: list[list[int]]
    steps: int
    fails: bool


class PlayedWorkers:
    """The workers of a decode engine.

    Args:
        rng: How long a pull takes, and whether it fails.
        fails: How often it does.
    """

    def __init__(self, rng, fails):
        self.pages = Pages()
        self.prefilled = {}
        """What waits at the prefill tier, by its name there."""
        self.pulls = {}
        """What is on its way, by the engine's name for its request."""
        self._rng, self._fails = rng, fails
        self._host = {}
        self._speed = SwapSpeed(1e-6)

    def run(self, output):
        """Compute a step; the names of those that have computed all that they have."""
        self.pages.take(output)
        step, names = output.kv_connector_metadata, output.num_scheduled_tokens
        self._swap(getattr(step, "swaps", None))
        for name, asked in step.reqs_to_recv.items():
            self._begin(name, asked)
        for name, tokens in names.items():
            self.pages.write(name, tokens, complete=True)
        self._spoil()
        for name in names:
            self.pages.read(name)
        rows = self.pages.rows
        return [name for name in names if rows[name].computed == len(rows[name].prefixes)]

    def transferred(self):
        """What the scheduler is told of pulls: which are over, and which blocks of these cannot be used."""
        for pull in self.pulls.values():
            pull.steps -= 1
        over = [name for name, pull in self.pulls.items() if pull.steps <= 0]
        pulls = [self.pulls.pop(name) for name in over]
        failed = {block for pull in pulls if pull.fails for block in pull.blocks}
        for pull in pulls:
            for block, part in zip(pull.blocks, pull.kv, strict=True):
                self.pages.overwrite(block, NOTHING if pull.fails else part)
        speed, self._speed = self._speed, None
        return KVConnectorOutput(
            finished_recving=set(over) or None, invalid_block_ids=failed, kv_connector_worker_meta=speed
        )

    def forget(self):
        """All KV is of no use any more."""
        self.pages.clear()
        self._host.clear()

    def _swap(self, swaps):
        if swaps is not None:
            for move in swaps.out:
                self._host[move.slot] = self.pages.block(move.block)
            for move in swaps.back:
                self.pages.overwrite(move.block, self._host.get(move.slot, NOTHING))

    def _begin(self, name, asked):
        """Pull the last ones of the blocks that wait, as vLLM does: what is before them is here."""
        kv = self.prefilled.pop(asked.remote.request_id)
        if blocks := [*asked.local_block_ids[0]] if asked.local_block_ids else []:
            parts = [kv[at : at + BLOCK] for at in range(0, len(kv), BLOCK)]
            assert len(blocks) <= len(parts)
            fails = self._rng.random() < self._fails
            self.pulls[name] = Pull(blocks, parts[-len(blocks) :], self._rng.randrange(1, 8), fails)

    def _spoil(self):
        """Until a pull is over there may be anything in its blocks, whatever was written to them."""
        for pull in self.pulls.values():
            for block in pull.blocks:
                self.pages.overwrite(block, NOTHING)


class PressedEngine:
    """An engine whose steps a test takes one at a time.

    Args:
        scheduler: Its scheduler, with a connector.
        clock: Its time.
        rng: What the world around it does.
        fails: How often a pull fails.
    """

    def __init__(self, scheduler, clock, rng, fails=0.1):
        init_none_hash(sha256)
        self.scheduler, self.clock = scheduler, clock
        self.workers = PlayedWorkers(rng, fails)
        self.jobs = []
        self.resumed = 0
        """How often a request has gone on whose memory had been taken."""
        self._rng = rng
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._attempts = {}
        self._coming_back = []

    def arrives(self, job, *, is_prefilled):
        """A client asks; its first token may come from the prefill tier."""
        self.jobs.append(job)
        job.tokens += [0] if is_prefilled else []
        self._attempt(job, is_prefilled)

    def goes(self, job):
        """A client goes before its answer has ended."""
        job.end = "left alone"
        if job.attempt is not None:
            self.scheduler.finish_requests([job.attempt], RequestStatus.FINISHED_ABORTED)

    def waiting(self):
        """Jobs whose answers have not ended."""
        return [job for job in self.jobs if job.end is None]

    def pulling(self):
        """Of these, the ones whose KV is on its way."""
        return [job for job in self.waiting() if job.attempt in self.workers.pulls]

    def step(self, meanwhile=lambda: None):
        """One step; `meanwhile` happens while it runs."""
        self._come_back()
        output = self.scheduler.schedule()
        check_blocks(self.scheduler)
        self.resumed += len(output.scheduled_cached_reqs.resumed_req_ids)
        names, done = [*output.num_scheduled_tokens], set(self.workers.run(output))
        sampled = [[self._sample(name)] if name in done else [] for name in names]
        self._time_passes(output.num_scheduled_tokens)
        meanwhile()
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self.workers.transferred(),
        )
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for one in outputs.outputs:
                self._hear(one)

    def forgets(self):
        """All KV is to be forgotten, as when the weights change; nothing may use it after that."""
        is_reset = False
        with suppress(RuntimeError):  # vLLM's, while some is on its way
            is_reset = self.scheduler.reset_prefix_cache(reset_running_requests=self._rng.random() < 0.5)
        if is_reset:
            self.workers.forget()

    def finish(self, meanwhile=lambda: None, within=50_000):
        """Step until all have ended, each with all its tokens, and nothing is left of any."""
        for _ in range(within):
            if not self._coming_back and not self.scheduler.requests:
                break
            self.step(meanwhile)
        self.step()
        assert all(job.end for job in self.jobs), "somebody never ended"
        for job in self.jobs:
            assert job.tokens == [*range(len(job.tokens))]
            assert job.end != "finished" or len(job.tokens) == job.max_tokens
        self._check_rest()

    def _attempt(self, job, is_prefilled):
        """Put the request for the rest of an answer into the engine."""
        job.attempt = name = f"{job.name}, attempt {len(self._attempts)}"
        self._attempts[name] = job
        extra = {**job.xargs, JOB_XARG: job.name}
        if job.tokens:
            extra[CARRIED_XARG] = {"token_ids": [*job.tokens], "is_sent": True}
        if is_prefilled:
            kv = prefixes([*job.prompt, *job.tokens[:-1]])
            self.workers.prefilled[name] = kv
            waits = [[*range(-(-len(kv) // BLOCK))]]
            extra[KV_PARAMS] = {
                **PREFILL,
                "do_remote_prefill": True,
                "remote_request_id": name,
                "remote_block_ids": waits,
            }
        params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True, extra_args=extra)
        self.scheduler.add_request(Request(name, job.prompt, params, None, block_hasher=self._hasher))

    def _come_back(self):
        """Those that have been away for long enough are put into the engine again, unless nobody waits."""
        self._coming_back = [(steps - 1, job) for steps, job in self._coming_back if job.end is None]
        for job in [job for steps, job in self._coming_back if steps <= 0]:
            self._attempt(job, is_prefilled=self._rng.random() < 0.8)
        self._coming_back = [(steps, job) for steps, job in self._coming_back if steps > 0]

    def _sample(self, name):
        token = len(self._attempts[name].tokens)
        self.workers.pages.rows[name].append(token)
        return token

    def _time_passes(self, scheduled):
        """As long as the engine takes it to have."""
        times = self.scheduler._times
        prompts = sum([tokens for tokens in scheduled.values() if tokens > 1])
        self.clock.now_s += times.fixed_s + times.stream_s * len(scheduled) + times.prompt_token_s * prompts

    def _hear(self, output):
        """A client gets something; nobody gets anything for an attempt that is over."""
        job = self._attempts[output.request_id]
        if job.end == "left alone":
            return
        assert job.attempt == output.request_id
        job.tokens += output.new_token_ids
        if output.finish_reason is None:
            return
        job.attempt = None
        match str(output.finish_reason), output.stop_reason:
            case "length", None:
                job.end = "finished"
            case "error", word if word == DROPPED:
                job.end = "dropped"
            case "error", word:
                assert word in {LEFT, None}
                self._coming_back.append((self._rng.randrange(1, 12), job))
            case how:
                raise AssertionError(how)

    def _check_rest(self):
        """Nothing is left of any request, here or at the prefill tier."""
        scheduler, book = self.scheduler, self.scheduler._book
        nobody = {job.name for job in self.jobs if job.end == "left alone"}
        connector, swaps = scheduler.connector.connector_scheduler, scheduler.connector.swaps
        assert scheduler.kv_cache_manager.usage == 0.0
        assert not any((scheduler.requests, scheduler.running, scheduler.waiting, scheduler.skipped_waiting))
        assert not any((book.accounts, book.parked, book.restoring, book.paced, book.untimed, book.droppable))
        assert not scheduler._relief._chosen
        assert {*scheduler._leavers.away} <= nobody
        assert not any((scheduler.finished_recving_kv_req_ids, scheduler.failed_recving_kv_req_ids))
        assert not any((connector._reqs_need_recv, connector._heartbeat_by_engine))
        assert not any((self.workers.pages.rows, self.workers.pulls, self.workers.prefilled))
        assert swaps is None or swaps.free_slots == swaps.slots
