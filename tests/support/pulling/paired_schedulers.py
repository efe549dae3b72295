"""A prefill and a decode engine without models, for a model with a full and a sliding-window layer.

Schedulers, KV memory and connectors of both are real. Played are the workers, who compute and pull as vLLM's
do: what a step reads must have been computed of its own sequence, wherever that was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from decode_steps import check_blocks
from real_schedulers import BLOCK, Pages, build
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from decode_node.scheduler import CarryingScheduler
from kv_transfer.connector import KVRole, kv_transfer_config
from prefill_node.engine.scheduler import SlackScheduler
from sampling.carried import CARRIED_XARG, KV_PARAMS
from telemetry.pulls import PULLS_KEY

NOTHING = (None,) * BLOCK
TOKEN = 7
"""What all answers are made of."""
LEASE_S = 600


class Engine:
    """One of the two, whose steps are taken one at a time."""

    def __init__(self, scheduler, window):
        init_none_hash(sha256)
        self.scheduler, self.pages = scheduler, Pages(window=window)
        self.answers, self.ended, self.pulls_told = {}, {}, 0
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def add(self, name, prompt, max_tokens, **extra):
        """Queue a request."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        self.answers[name] = []
        self.scheduler.add_request(Request(name, [*prompt], params, None, block_hasher=self._hasher))

    def step(self, transfer):
        """One step; `transfer` gets the connector's part of it, and says what has been transferred."""
        output = self.scheduler.schedule()
        check_blocks(self.scheduler)
        self.pages.take(output)
        names = [*output.num_scheduled_tokens]
        for name, tokens in output.num_scheduled_tokens.items():
            self.pages.write(name, tokens, complete=True)
        for name, tokens in output.num_scheduled_tokens.items():
            self.pages.read(name, tokens)
        rows = [self.pages.rows[name] for name in names]
        done = [row.computed == len(row.prefixes) for row in rows]
        for row, is_done in zip(rows, done, strict=True):
            if is_done:
                row.append(TOKEN)
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] if is_done else [] for is_done in done],
            kv_connector_output=transfer(output.kv_connector_metadata),
        )
        for outputs in self.scheduler.update_from_output(output, ran).values():
            told = getattr(outputs.scheduler_stats, "kv_connector_stats", None) or {}
            self.pulls_told += told.get(PULLS_KEY, 0)
            for one in outputs.outputs:
                self.answers[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    assert one.request_id not in self.ended, "ended twice"
                    self.ended[one.request_id] = one

    def check_rest(self):
        """Nothing is left of any request."""
        scheduler = self.scheduler
        assert not any((scheduler.requests, scheduler.running, scheduler.waiting, scheduler.skipped_waiting))
        assert not any((scheduler.finished_recving_kv_req_ids, scheduler.failed_recving_kv_req_ids))
        assert scheduler.kv_cache_manager.usage == 0.0


@dataclass
class Pull:
    """KV on its way, for so many more steps.

    Attributes:
        asked: What decode's connector has told its workers.
        steps: Until it is over.
        fails: The groups of which nothing arrives.
    """

    asked: object
    steps: int = 0
    fails: tuple[int, ...] = ()
    told: bool = False

    @property
    def lost(self):
        """Where nothing arrives."""
        return {block for group in self.fails for block in self.asked.local_block_ids[group]}


@dataclass
class Pair:
    """Both engines.

    Attributes:
        pull: Says of each pull how many steps it takes, and what of it fails.
        also_invalid: Blocks that decode's workers name with the next ones of a pull that has failed.
        pulled: How many blocks of each group have been asked for, by request.
    """

    prefill: Engine
    decode: Engine
    pull: object = Pull
    also_invalid: frozenset[int] = frozenset()
    pulls: dict = field(default_factory=dict)
    pulled: dict = field(default_factory=dict)

    @staticmethod
    def of(model, window, *, blocks=3000, decode_blocks=400, chunk=64):
        """With so many blocks each; prompts are computed in chunks of so many tokens."""
        made = [
            Engine(
                build(
                    scheduler,
                    model,
                    memory,
                    chunk=chunk,
                    window=window,
                    transfer=kv_transfer_config(role, "cpu", LEASE_S),
                ),
                window,
            )
            for scheduler, memory, role in (
                (SlackScheduler, blocks, KVRole.PREFILL),
                (CarryingScheduler, decode_blocks, KVRole.DECODE),
            )
        ]
        return Pair(*made)

    def ask(self, name, prompt, max_tokens, carried=(TOKEN,)):
        """Have a prompt prefilled, and go on from these tokens; without any decode samples the first one."""
        extra = {KV_PARAMS: {"do_remote_decode": True, "do_remote_prefill": False}}
        self.prefill.add(name, [*prompt, *carried[:-1]], 1, **extra)
        while name not in self.prefill.ended:
            self.prefill.step(lambda _: None)
        extra = {KV_PARAMS: self.prefill.ended[name].kv_transfer_params}
        if carried:
            extra[CARRIED_XARG] = {"token_ids": [*carried]}
        self.decode.add(name, prompt, max_tokens, **extra)

    def step(self):
        """One step of decode; what is over is free on prefill."""
        self.decode.step(self._transfer)

    def finish(self, within=5000):
        """Step until decode has nothing left to do."""
        for _ in range(within):
            if not self.decode.scheduler.requests:
                return
            self.step()
        raise AssertionError("somebody never ended")

    def check_rest(self):
        """Nothing is left of any request."""
        self.step()
        self.decode.check_rest()
        self.prefill.check_rest()
        assert not self.pulls

    def _transfer(self, step):
        for name, asked in step.reqs_to_recv.items():
            self.pulled[name] = tuple(map(len, asked.local_block_ids))
            if any(asked.local_block_ids):
                self.pulls[name] = self.pull(asked)
            else:
                self._sent(asked)
        over, invalid = set(), set()
        for name, pull in [*self.pulls.items()]:
            if pull.lost and not pull.told:
                invalid |= pull.lost | self.also_invalid
                pull.told = True
            pull.steps -= 1
            if pull.steps < 0:
                over.add(name)
                self._copy(pull)
                self._sent(pull.asked)
                del self.pulls[name]
            else:
                self._spoil(pull)
        return KVConnectorOutput(finished_recving=over or None, invalid_block_ids=invalid)

    def _spoil(self, pull):
        """Until a pull is over there may be anything in its blocks, whatever was written to them."""
        for blocks in pull.asked.local_block_ids:
            for block in blocks:
                self.decode.pages.overwrite(block, NOTHING)

    def _copy(self, pull):
        """As vLLM's worker pairs the blocks of both sides."""
        here, there = NixlPullConnectorWorker._apply_prefix_caching(
            SimpleNamespace(_has_mamba=False),
            pull.asked.local_block_ids,
            pull.asked.remote.block_ids,
            decode_physical_per_logical=1,
            prefill_physical_per_logical=1,
        )
        for ours, theirs in zip(here, there, strict=True):
            for to, source in zip(ours, theirs, strict=True):
                found = NOTHING if to in pull.lost else self.prefill.pages.block(source)
                self.decode.pages.overwrite(to, found)

    def _sent(self, asked):
        sent = KVConnectorOutput(finished_sending={asked.remote.request_id})
        self.prefill.step(lambda _: sent)
