"""Measures what prefills take on a replica, through the engine's own queue.

Owns the prompts that are measured. What follows from the times is `slo.predict.prefill_time`'s; that nothing
else runs meanwhile is up to whoever asks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ray.serve.llm.openai_api_models import CompletionRequest
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from slo.predict.measured_on import Measurable, Subject
from slo.predict.prefill_time import Sample

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LONG_S: Final = 1.0
"""A prefill that takes longer is not done a third time before a replica is ready."""
_MORE_TRIES: Final = 5
"""Of a prefill that took no less than a longer one. An accelerator's short ones may all take the same."""


class OtherSubjectError(RuntimeError):
    """The profile was measured on something else than this replica."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__(
            f"profile: it was measured on something else: {', '.join(differences)}; measure this deployment "
            "with `slackserve calibrate`, or leave `profile` out"
        )


@dataclass(frozen=True, slots=True)
class Probe:
    """Prefills random tokens.

    Attributes:
        model: What requests call the model.
    """

    engine: Any
    model: str

    def about(self, configured: Subject) -> Measurable:
        """What is measured: what is configured, completed by what the engine has found."""
        config = self.engine._engine_client.vllm_config  # noqa: SLF001 - no public way in
        cache = config.cache_config
        return Measurable(
            replace(
                configured,
                accelerator=current_platform.get_device_name(),
                tensor_parallel=config.parallel_config.tensor_parallel_size,
                dtype=str(config.model_config.dtype).removeprefix("torch."),
            ),
            config.model_config.max_model_len,
            cache.block_size if cache.enable_prefix_caching else 0,
            kv_bytes_per_token(config),
        )

    async def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds that the prefill of random tokens takes behind a prefix whose KV is in the cache.

        The prefix of one length is always the same, so that it is computed once.

        Raises:
            RuntimeError: when the engine refuses it, for example because it is longer than the model.
        """
        prefix = self._tokens(random.Random(context_tokens), context_tokens)  # noqa: S311 - not a secret
        if prefix:
            await self._run(prefix)
        prompt = prefix + self._tokens(random.Random(), tokens)  # noqa: S311 - not a secret
        started_s = time.monotonic()
        await self._run(prompt)
        return time.monotonic() - started_s

    async def warm_up(self, lengths: tuple[int, ...]) -> list[Sample]:
        """Touch the memory of long prefills, then measure: the first of each length is slow.

        The shorter of two measurements counts: whatever else the machine does can only lengthen one. Of a
        prefill that takes more than `LONG_S`, in which little is left of what is done once, the first is one
        of the two. One that took no less than a longer one was disturbed twice, and is measured again: as it
        is, it would say that tokens take no time, and the longest prompts would be promised that.
        """
        config = self.engine._engine_client.vllm_config  # noqa: SLF001 - no public way in
        # One that is computed in several passes would say nothing of one.
        longest = min(config.model_config.max_model_len - 1, config.scheduler_config.max_num_batched_tokens)
        fitting = sorted({min(tokens, longest) for tokens in lengths} | {min(lengths[0], longest // 2)})
        first_s = {tokens: await self.prefill_s(tokens) for tokens in fitting}
        least_s = {}
        for tokens in fitting:
            other_s = first_s[tokens] if first_s[tokens] > LONG_S else await self.prefill_s(tokens)
            least_s[tokens] = min(other_s, await self.prefill_s(tokens))
        for _ in range(_MORE_TRIES):
            for shorter, longer in pairwise(fitting):
                if least_s[shorter] >= least_s[longer]:
                    least_s[shorter] = min(least_s[shorter], await self.prefill_s(shorter))
        return [Sample(tokens, seconds) for tokens, seconds in least_s.items()]

    def _tokens(self, drawn: random.Random, count: int) -> list[int]:
        vocabulary = self.engine._engine_client.model_config.get_vocab_size()  # noqa: SLF001
        return drawn.choices(range(vocabulary), k=count)

    async def _run(self, prompt: list[int]) -> None:
        request = CompletionRequest(model=self.model, prompt=prompt, max_tokens=1, ignore_eos=True)
        async for chunk in self.engine.completions(request, None):
            if (error := getattr(chunk, "error", None)) is not None:
                raise RuntimeError(error.message)


def kv_bytes_per_token(config: VllmConfig) -> int:
    """Bytes of one token's KV on all ranks together: a key and a value per layer and KV head.

    Latent attention (MLA) keeps one vector per layer instead.
    """
    model = config.model_config
    dtype = kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model)
    heads = 1 if model.use_mla else 2 * model.get_total_num_kv_heads()
    return int(model.get_total_num_hidden_layers() * heads * model.get_head_size() * dtype.itemsize)
