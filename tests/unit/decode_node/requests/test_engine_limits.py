"""What would end an engine is refused before one has seen it, so that nobody places it again."""

import re

import pytest
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.hf import get_cached_tokenizer

from benchmarks.harness.tiny_models import build_tiny_llama
from decode_node.requests import engine_limits

PROMPT = {"type": "token", "prompt_token_ids": [1, 2, 3]}
TEXTS = [f"{number:017}" for number in range(64)]
"""As many as the ingress lets through, and a quarter as long; with a token for each byte 1,088 of them."""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    model = build_tiny_llama(tmp_path_factory.mktemp("m") / "tiny")
    tokenizer = get_cached_tokenizer(PreTrainedTokenizerFast.from_pretrained(model))

    class Client:
        asked = 0
        tokenised = 0
        model_config = ModelConfig(str(model))

        def get_tokenizer(self):
            return tokenizer

        async def generate(self, prompt, params, request_id):
            self.asked += 1
            yield request_id

    client, encode = Client(), tokenizer.encode

    def counted(*args, **kwargs):
        client.tokenised += 1
        return encode(*args, **kwargs)

    tokenizer.encode = counted
    engine_limits.stand_before(client)
    return client


async def answer(client, prompt=PROMPT, **given):
    return [piece async for piece in client.generate(prompt, SamplingParams(**given), "name")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias has 1025 token ids; the engine takes 1024",
        ),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids has 1025"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids has 129"),
        ({"stop_token_ids": list(range(113)), "min_tokens": 1}, "stop_token_ids has 113"),
        ({"bad_words": [f"{number:03}" for number in range(129)]}, "Too many bad words after tokenization"),
        (
            {"bad_words": TEXTS},
            "bad_words has 1088 tokens, with and without a blank before each text; the engine takes 1024",
        ),
        ({"routed_experts_prompt_start": 3}, "routed_experts_prompt_start is 3, and the prompt has 3 tokens"),
    ],
)
async def test_what_ends_an_engine_is_refused(client, given, message):
    asked = client.asked
    with pytest.raises(VLLMValidationError, match=re.escape(message)) as refused:
        await answer(client, **given)
    assert refused.value.parameter == next(iter(given))
    assert client.asked == asked


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"logit_bias": dict.fromkeys(range(1024), 1.0), "allowed_token_ids": [1] * 1024},
        {"logprob_token_ids": [1] * 128, "stop_token_ids": list(range(112)), "min_tokens": 1},
        {"bad_words": [text[1:] for text in TEXTS]},
        {"routed_experts_prompt_start": 2},
    ],
)
async def test_what_the_engine_bears_is_passed_on(client, given):
    assert await answer(client, **given) == ["name"]


async def test_the_bad_words_of_several_prompts_are_made_tokens_of_once(client):
    before = client.tokenised
    for prompt in (PROMPT, {"type": "token", "prompt_token_ids": [4]}):
        assert await answer(client, prompt, bad_words=["one", "two"]) == ["name"]
    assert client.tokenised - before == 4, "each with and without a blank before it"
    await answer(client, bad_words=["one"])
    assert client.tokenised - before == 6


async def test_a_prompt_has_tokens_that_the_model_knows(client):
    """An id of `vocab_size` passes vLLM's own check, and ended one engine after the other."""
    vocabulary = client.model_config.get_vocab_size()
    assert vocabulary <= client.get_tokenizer().max_token_id
    assert await answer(client, {"type": "token", "prompt_token_ids": [vocabulary - 1]}) == ["name"]
    for token_id in (vocabulary, vocabulary + 1):
        with pytest.raises(VLLMValidationError, match=f"id {token_id}; .* last one is {vocabulary - 1}"):
            await answer(client, {"type": "token", "prompt_token_ids": [1, token_id]})


async def test_what_an_image_stands_for_needs_no_embedding(client):
    vocabulary = client.model_config.get_vocab_size()
    prompt = {
        "type": "multimodal",
        "prompt_token_ids": [1, vocabulary, vocabulary, 2],
        "mm_placeholders": {"image": [PlaceholderRange(1, 2)]},
    }
    assert await answer(client, prompt) == ["name"]
    prompt["mm_placeholders"]["image"] = [PlaceholderRange(1, 1)]
    with pytest.raises(VLLMValidationError, match="the prompt has the token id"):
        await answer(client, prompt)
