"""A vLLM worker whose requests go on from carried tokens, and whose seeds survive chunked prompts.

Wraps a method of the batch of vLLM's first model runner, where every request enters, and has that batch and
the sampler keep requests apart, in what they get and in what they cost. The second runner takes a request's
generated tokens from the scheduler and has seeds that depend on positions alone; it needs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sampling.allowed_tokens import keep_masks_right
from sampling.carried import Carried
from sampling.named_logprobs import keep_top_logprobs
from sampling.penalties import count_only_who_asks
from sampling.seeds import Draw, take_up
from sampling.thinking import look_at_what_is_new

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CarryingWorker:
    """Mixed into a vLLM worker; see the module."""

    vllm_config: VllmConfig
    model_runner: Any

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, which makes the batch that stays, and wrap that."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc] # the worker mixed in
        if self.vllm_config.use_v2_model_runner:
            return
        batch = self.model_runner.input_batch
        take_in = batch.add_request
        width = torch.float64 if self.vllm_config.model_config.use_fp64_gumbel else torch.float32
        draw = Draw(batch.vocab_size, width, self.model_runner.device)

        def add_request(state: Any) -> int:
            _go_on(state, draw)
            return int(take_in(state))

        batch.add_request = add_request
        keep_masks_right(batch, self.model_runner.requests)
        keep_top_logprobs(self.model_runner.sampler)
        count_only_who_asks(self.model_runner.sampler, batch)
        if (holder := batch.thinking_budget_state_holder) is not None:
            look_at_what_is_new(holder)


def _go_on(state: Any, draw: Draw) -> None:
    """Give a request, vLLM's `CachedRequestState`, the tokens that it brings along, the first time."""
    carried = Carried.of(state.sampling_params)
    new = 0
    if carried is not None and not state.output_token_ids:
        state.output_token_ids.extend(carried.token_ids)
        new = len(carried.token_ids)
    take_up(state, new, draw)
