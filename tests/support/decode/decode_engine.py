"""A decode engine with little KV memory, all in this process, and requests that push each other out of it."""

import os

import pytest
from engines import random_prompt
from ports import free_port

from decode_node.requests.dropping import MAY_DROP_XARG
from kv_transfer.connector import KVRole, kv_transfer_config
from slo.request import TIER_XARG, TPOT_XARG

BLOCK, ROOM = 128, 11
CLOSE = 1e-3
"""Where the two likeliest tokens are closer than this, either may be sampled."""
OPTIONS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "long_prefill_token_threshold": 128,
    "block_size": BLOCK,
    "num_gpu_blocks_override": ROOM + 1,
    "scheduler_cls": "decode_node.engine.pressure_scheduler.PressureScheduler",
    "worker_cls": "decode_node.worker.cpu.CarryingCPUWorker",
}


BLOCK_BYTES = 4 * 2 * 2 * 32 * 4 * BLOCK
"""Layers, keys and values, heads, their size, bytes and tokens of the tiny Llama's blocks."""


def swapping(blocks):
    """Engine arguments for host memory with room for so many blocks."""
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    transfer = kv_transfer_config(KVRole.DECODE, "cpu", 30, swap_bytes=blocks * BLOCK_BYTES)
    return {"kv_transfer_config": transfer}


class DecodeEngine:
    def __init__(self, llm):
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.preempted, self.answers = [], {}
        take = self.scheduler._preempt_request

        def counting(request, *args, **kwargs):
            self.preempted.append(request.request_id.partition("-")[0])
            take(request, *args, **kwargs)

        self.scheduler._preempt_request = counting

    def add(self, name, prompt, max_tokens, *, tier="standard", tpot_s=None, may_drop=False, **sampling):
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        extra = {TIER_XARG: tier, MAY_DROP_XARG: may_drop} | ({} if tpot_s is None else {TPOT_XARG: tpot_s})
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=2,
            ignore_eos=True,
            extra_args=extra,
            **{"temperature": 0, **sampling},
        )
        self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), params)

    def step(self):
        for output in self.llm.llm_engine.step():
            if output.finished:
                assert output.request_id not in self.answers, "ended twice"
                self.answers[output.request_id] = output.outputs[0]
        manager = self.scheduler.kv_cache_manager
        held = {
            block.block_id
            for blocks in manager.coordinator.single_type_managers[0].req_to_blocks.values()
            for block in blocks
        }
        assert manager.block_pool.get_num_free_blocks() + len(held) == ROOM

    def step_until(self, is_so):
        for _ in range(2000):
            if is_so():
                return
            self.step()
        raise AssertionError("did not come to it")

    def finish(self):
        for _ in range(20_000):
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.requests
        for left in ("accounts", "parked", "restoring", "paced", "untimed", "droppable"):
            assert not getattr(self.scheduler._book, left), left
        assert not self.scheduler._relief._chosen
        assert self.scheduler.kv_cache_manager.usage == 0.0
        if self.scheduler._swaps is not None:
            self.scheduler._swaps.step()  # what came free with the last step
            assert self.scheduler._swaps.free_slots == self.scheduler._swaps.slots

    def forget(self):
        assert self.llm.reset_prefix_cache()
        self.preempted.clear()
        self.answers.clear()
        # By prediction all are about to end: whoever fits is admitted, and they push each other out.
        self.scheduler._lengths.remaining = lambda *_: 1

    def alone(self, asked):
        """What each is answered by itself."""
        answers = {}
        for name, arguments in asked.items():
            self.forget()
            self.add(name, *arguments[0], **arguments[1])
            self.finish()
            answers[name] = self.answers[name]
        assert not self.preempted
        return answers

    def taken_by(self):
        """What became of the KV of those that lost their memory."""
        return {by for _, _, by in self.scheduler._report.figures.preempted}

    def together(self, asked):
        self.forget()
        for name, arguments in asked.items():
            self.add(name, *arguments[0], **arguments[1])
        self.finish()
        return dict(self.answers)


def asked(prompt, tokens, **options):
    return (prompt, tokens), options


def check_same(expected, found):
    for name, answer in expected.items():
        other = found[name]
        assert len(other.token_ids) == len(answer.token_ids)
        for at, (token, position) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            best = sorted((one.logprob for one in position.values()), reverse=True)
            if best[0] - best[1] < CLOSE:
                break  # from here on the two may differ
            assert other.token_ids[at] == token, f"{name} at {at}"
            assert other.logprobs[at][token].logprob == pytest.approx(position[token].logprob, abs=1e-4)


def crowd(**more):
    """More than there is room for, with prompts around the boundaries of blocks."""
    return {
        f"{length}": asked(random_prompt(length, seed=length), 150, **more)
        for length in (BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)
    }
