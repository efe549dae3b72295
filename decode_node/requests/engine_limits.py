"""Refuses what no engine takes, before one has seen it: a request that ends an engine would be placed again.

Owns what only a replica can count, as its tokenizer has it. The numbers are `sampling.engine_limits`'s, with
those that an operator can set for vLLM (`VLLM_MAX_BAD_WORDS_TOTAL_TOKENS`, `VLLM_MAX_NUM_BAD_WORDS`).
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from sampling.engine_limits import MOST_LOGPROB_TOKEN_IDS, MOST_STOP_TOKENS, MOST_TOKEN_IDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

_KEPT: Final = 16
"""Lists of bad words whose number of tokens is kept: all prompts of a request have the same one."""


def stand_before(client: Any) -> None:
    """Have vLLM's client refuse what its engine is asked to generate when that is more than it takes."""
    generate, tokenizer = client.generate, client.get_tokenizer()
    vocabulary = client.model_config.get_vocab_size()
    bad_word_tokens = lru_cache(_KEPT)(partial(_bad_word_tokens, tokenizer))

    def checked(prompt: Any, params: SamplingParams, *rest: Any, **options: Any) -> AsyncGenerator[Any, None]:
        refuse_unknown_tokens(prompt, vocabulary)
        refuse_excess(params, prompt.get("prompt_token_ids") or (), bad_word_tokens)
        answer: AsyncGenerator[Any, None] = generate(prompt, params, *rest, **options)
        return answer

    client.generate = checked


def refuse_unknown_tokens(prompt: Mapping[str, Any], vocabulary: int) -> None:
    """Refuse a prompt with a token that the model does not know, other than for an image or a sound.

    vLLM lets ids up to its tokenizer's `vocab_size` pass, which may be a size and not the last id.

    Args:
        prompt: As vLLM's renderer has made it.
        vocabulary: How many tokens the model knows.

    Raises:
        VLLMValidationError: naming the token.
    """
    token_ids = prompt.get("prompt_token_ids") or ()
    if max(token_ids, default=0) < vocabulary:
        return
    places = chain.from_iterable(prompt.get("mm_placeholders", {}).values())
    stands_for = {at for place in places for at in range(place.offset, place.offset + place.length)}
    for at, token_id in enumerate(token_ids):
        if token_id >= vocabulary and at not in stands_for:
            raise VLLMValidationError(
                f"the prompt has the token id {token_id}; the model's last one is {vocabulary - 1}"
            )


def refuse_excess(
    params: SamplingParams, prompt_token_ids: Any, bad_word_tokens: Callable[[tuple[str, ...]], int]
) -> None:
    """Refuse parameters that an engine does not take.

    Args:
        params: Of a request.
        prompt_token_ids: Of one of its prompts.
        bad_word_tokens: How many tokens bad words are.

    Raises:
        VLLMValidationError: naming the field and the limit.
    """
    found = (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MOST_TOKEN_IDS, "token ids"),
        ("logit_bias", len(params.logit_bias or ()), MOST_TOKEN_IDS, "token ids"),
        ("logprob_token_ids", len(params.logprob_token_ids or ()), MOST_LOGPROB_TOKEN_IDS, "token ids"),
        ("stop_token_ids", len(params.all_stop_token_ids), MOST_STOP_TOKENS, "token ids"),
        (
            "bad_words",
            bad_word_tokens(tuple(params.bad_words or ())),
            envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
            "tokens, with and without a blank before each text",
        ),
    )
    for field, count, most, what in found:
        if count > most:
            raise VLLMValidationError(f"{field} has {count} {what}; the engine takes {most}", parameter=field)
    start = params.routed_experts_prompt_start
    if start and start >= len(prompt_token_ids):
        raise VLLMValidationError(
            f"routed_experts_prompt_start is {start}, and the prompt has {len(prompt_token_ids)} tokens",
            parameter="routed_experts_prompt_start",
        )


def _bad_word_tokens(tokenizer: Any, bad_words: tuple[str, ...]) -> int:
    """How many tokens a request's bad words are, as vLLM will make them.

    Raises:
        VLLMValidationError: There are too many texts, or one that is no token.
    """
    if not bad_words:
        return 0
    tried = SamplingParams(bad_words=list(bad_words))
    tried.update_from_tokenizer(tokenizer)
    return sum(map(len, tried.bad_words_token_ids or ()))
