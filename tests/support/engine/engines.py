"""Real vLLM engines whose steps a test takes one at a time.

The scheduler runs in the test's own process, so that a test sees its state and a step is one call. So does
the worker of an engine with one rank, as on a replica; several ranks have processes of their own.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.offline_engine import offline_engine
from prefill_node.board import events as notices
from prefill_node.board.messages import StopOrder
from prefill_node.engine.queue import argument
from prefill_node.engine_setup import EngineSetup
from slo.predict.prefill_time import PrefillPredictor
from slo.request import DEADLINE_XARG, JOB_XARG, PREDICTOR_XARG, STOP_BOUND_XARG, TIER_XARG, WEIGHT_XARG

COMPILED = {
    "setup": EngineSetup(mode="resume", granularity="operator", compiled=True),
    "enforce_eager": False,
}
"""For an engine whose passes are compiled in pieces."""
_A_LETTER = 83


@dataclass
class Answer:
    """What a request ended with."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[int, float], ...]
    kv: tuple[str, ...]


class Engine:
    """An engine and its board; `step` takes one engine step."""

    def __init__(self, llm, board, *, is_scripted):
        self.llm = llm
        self.board = board
        self.is_scripted = is_scripted
        self.answers: dict[str, Answer] = {}
        self.cached_tokens: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._adapters: dict[Path, int] = {}
        self._watch_frees()

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def boundaries(self):
        return len(self.rpc("preemption_support")[0][0])

    def rpc(self, method, *args):
        """What each worker's `method` returns."""
        return self.core.model_executor.collective_rpc(method, args=args)

    def add(
        self,
        name,
        prompt,
        *,
        deadline_s=None,
        weight=1.0,
        tier=None,
        adapter=None,
        stop_bound=None,
        **sampling,
    ):
        """Queue a request whose job is `name`, for one greedy token unless `sampling` says otherwise.

        `adapter` is the directory of a LoRA adapter that answers; `stop_bound` how soon steps must stop from
        now on.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        arguments = {
            JOB_XARG: name,
            WEIGHT_XARG: weight,
            PREDICTOR_XARG: PrefillPredictor(1e-5, 1e-3).encode(),
        }
        if stop_bound is not None:
            arguments[STOP_BOUND_XARG] = stop_bound.encode()
        if tier is not None:
            arguments[TIER_XARG] = tier
        if deadline_s is not None:
            arguments[DEADLINE_XARG] = time.monotonic() + deadline_s
        arguments |= sampling.pop("extra_args", {})
        params = SamplingParams(
            logprobs=5,
            ignore_eos=True,
            extra_args=arguments,
            **{"temperature": 0, "max_tokens": 1, **sampling},
        )
        self.llm.llm_engine.add_request(
            name,
            TokensPrompt(prompt_token_ids=list(prompt)),
            params,
            lora_request=None if adapter is None else self._adapter(adapter),
        )

    def _adapter(self, directory):
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(directory, len(self._adapters) + 1)
        return LoRARequest(directory.name, number, str(directory))

    def abort(self, *names):
        self.llm.llm_engine.abort_request(list(names), internal=False)

    def abort_frontend(self, *names):
        """Forget requests that the engine itself has aborted."""
        self.llm.llm_engine.output_processor.abort_requests(list(names), internal=False)

    def stop_at(self, *boundaries):
        """Stop the passes that reach these boundaries next, in this order."""
        self.rpc("stop_at", boundaries)

    def order_stop(self, beneficiary=""):
        """Tell the scheduler for whom the next step will stop; the workers' script does the stopping."""
        step = self.scheduler._stepper.step_id + 1
        self.board.order_stop(StopOrder(step, beneficiary, "rescue", time.monotonic()))

    def kept_bytes(self, name, prompt, boundary, **options):
        """Start a prefill and stop it; the bytes that each rank keeps of it beside KV blocks."""
        self.add(name, prompt, **options)
        self.stop_at(boundary)
        assert self.step() == []
        (stopped,) = [notice for notice in self.notices() if isinstance(notice, notices.Stopped)]
        assert stopped.is_kept
        return stopped.checkpoint_bytes

    def step(self):
        """Take one step; the names of the requests that ended in it."""
        ended = []
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.answers[output.request_id] = self._answer(output)
                self.cached_tokens[output.request_id] = output.num_cached_tokens
                ended.append(output.request_id)
        return ended

    def finish(self, within_s=60):
        """Step until nothing is left to do."""
        deadline_s = time.monotonic() + within_s
        while self.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < deadline_s, f"not done after {within_s} s"
            self.step()

    def prefill(self, name, prompt, **options):
        """Run one request alone, to its end."""
        self.add(name, prompt, **options)
        self.finish()
        return self.answers[name]

    def forget(self):
        """Empty the prefix cache and the KV blocks; nothing may be under way."""
        assert self.llm.reset_prefix_cache()
        self.rpc("clear_kv")
        self.notices()
        self.answers.clear()

    def notices(self):
        """What the scheduler has reported since the last call."""
        return [notices.decode(record) for record in self.board.take_events()]

    def check_at_rest(self):
        """Nothing is suspended, kept or held."""
        self.llm.llm_engine.step()  # the workers learn of the last requests' ends with the next step
        suspensions = self.scheduler._suspensions
        assert not suspensions.steps
        assert not suspensions.accounts
        assert not self.scheduler.requests
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.scheduler._inflight_prefills
        assert not self.scheduler._wasted._hit_tokens
        assert self.scheduler.kv_cache_manager.usage == 0.0
        assert set(self.rpc("checkpoints_held")) == {0}

    def _watch_frees(self):
        free = self.scheduler._free_blocks

        def freeing(request):
            if (name := argument(request, JOB_XARG)) is not None:
                groups = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
                self._blocks[name] = [block for group in groups for block in group if block]  # 0 is nobody's
            free(request)

        self.scheduler._free_blocks = freeing

    def _answer(self, output):
        name, completion = output.request_id, output.outputs[0]
        logprobs = tuple((t, p.logprob) for step in completion.logprobs for t, p in sorted(step.items()))
        blocks = self._blocks.pop(name)
        kv = self.rpc("kv_digest", blocks) if self.is_scripted else ()
        return Answer(tuple(completion.token_ids), logprobs, tuple(kv))


@contextmanager
def engine(
    model, *, tensor_parallel_size=1, setup=None, worker="scripted_worker.ScriptedCPUWorker", **options
):
    """Start an engine that can be preempted, by a script or, with the real worker, through its board."""
    executor = "uni" if tensor_parallel_size == 1 else "mp"  # as the replicas have it
    defaults = {
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 160,  # ten of the longest prompts; all blocks are zeroed again and again
        "distributed_executor_backend": executor,
    }
    options = defaults | options
    with offline_engine(model, worker, ranks=tensor_parallel_size, setup=setup, **options) as (llm, board):
        yield Engine(llm, board, is_scripted=worker.startswith("scripted_worker."))


def random_prompt(length, seed=None, vocabulary=250):
    """Tokens that no other prompt begins with."""
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


def whole_prompt(length, seed=None):
    """Random tokens and a letter: behind half a character, vLLM's answer begins with all of the prompt."""
    return [*random_prompt(length - 1, seed), _A_LETTER]
