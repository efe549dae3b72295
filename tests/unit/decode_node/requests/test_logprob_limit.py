"""How many log-probabilities one request may ask for, of whole answers and of prompts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from decode_node.rendering import Rendered
from decode_node.requests.logprob_limit import MAX_LOGPROBS, LogprobLimit
from deployments.config.limits import LimitsConfig

LIMIT = LogprobLimit(1000, vocabulary=50, max_model_len=100)
STREAM = {"stream": True}


def completion(**fields):
    return CompletionRequest(**{"model": "m", "prompt": "hello", "max_tokens": 10, **fields})


def chat(**fields):
    messages = [{"role": "user", "content": "hello"}]
    return ChatCompletionRequest(**{"model": "m", "messages": messages, "logprobs": True, **fields})


def rendered(request, of_prompt):
    """As a decode replica has it, each of its prompts with so many tokens."""
    prompts = len(request.prompt) if isinstance(getattr(request, "prompt", None), list) else 1
    n = 1 if getattr(request, "use_beam_search", False) else request.n or 1
    return Rendered([], prompts=prompts * n, input_tokens=prompts * of_prompt)


def counted(request, of_prompt=10, limit=LIMIT):
    """How many log-probabilities a request counts for: the lowest limit under which it is not refused."""

    def is_refused(allowed):
        made = LogprobLimit(allowed, limit.vocabulary, limit.max_model_len, limit.max_tokens)
        return made.refusal(request, rendered(request, of_prompt)) is not None

    return next(count for count in range(20_000) if not is_refused(count))


@pytest.mark.parametrize(
    ("request_", "count"),
    [
        (completion(), 0),
        (completion(logprobs=0), 10),
        (completion(logprobs=5), 60),
        (completion(logprobs=5, n=3), 180),
        (completion(logprobs=5, prompt=["a", "b"], n=3), 360),
        (completion(logprobs=5, n=3, use_beam_search=True), 180),
        (completion(logprobs=1, logprob_token_ids=[1, 2, 3]), 40),
        (completion(logprobs=-1), 510),
        (completion(logprobs=0, max_tokens=200), 90),
        (completion(logprobs=0, max_tokens=200, prompt=["a", "b"], n=2), 360),
        (completion(logprobs=5, **STREAM), 0),
        (completion(prompt_logprobs=5), 60),
        (completion(prompt_logprobs=5, prompt=["a", "b"], n=2), 240),
        (completion(prompt_logprobs=-1), 510),
        (completion(prompt_logprobs=1, logprobs=2), 50),
        (completion(echo=True), 0),
        (completion(echo=True, logprobs=5), 120),
        (completion(echo=True, logprobs=5, max_tokens=0), 60),
        (completion(echo=True, logprobs=5, **STREAM), 60),
        (chat(), 1),
        (chat(logprobs=False), 0),
        (chat(top_logprobs=None), 0),
        (chat(max_tokens=20, top_logprobs=4), 100),
        (chat(max_completion_tokens=30, max_tokens=20, top_logprobs=4), 150),
        (chat(max_tokens=20, logprob_token_ids=[1, 2]), 60),
        (chat(max_tokens=20, top_logprobs=4, **STREAM), 0),
        (chat(logprobs=False, echo=True), 10),
    ],
)
def test_what_a_request_counts_for(request_, count):
    assert counted(request_) == count


def test_an_answer_is_as_long_as_there_is_room_for_unless_the_model_ends_it_before():
    assert counted(chat(), of_prompt=99) == 1
    assert counted(completion(logprobs=0, max_tokens=90), of_prompt=40) == 60
    by_default = LogprobLimit(0, vocabulary=50, max_model_len=100, max_tokens=16)
    assert counted(chat(n=2), limit=by_default) == 32
    assert counted(chat(max_tokens=20), limit=by_default) == 20


@pytest.mark.parametrize(
    ("request_", "max_tokens"),
    [
        (chat(top_logprobs=4, n=3), 66),
        (chat(top_logprobs=4, n=2), None),
        (chat(top_logprobs=4, n=3, max_tokens=80), 80),
        (chat(top_logprobs=4, n=3, prompt_logprobs=9), 46),
        (chat(n=3, **STREAM), None),
        (chat(n=16, top_logprobs=20, logprob_token_ids=[1] * 128), 1),
    ],
)
def test_an_answer_whose_request_names_no_length_ends_before_it_has_more_than_it_may(request_, max_tokens):
    """Clients of models with room for 128k tokens ask for log-probabilities and name no length."""
    made = replace(rendered(request_, of_prompt=10), request=request_.model_copy())
    LIMIT.bound(request_, made)
    assert made.request.max_tokens == max_tokens


OF_PROMPTS = "11 for each of 100 tokens of prompts, times n"
LESS = "ask for fewer of each token"
SHORTER = "give a smaller max_tokens, or have the answer streamed"
FEWER = "send fewer or shorter prompts"
LIMITED = "limits.max_logprobs allows 1000"


@pytest.mark.parametrize(
    ("request_", "param", "asked", "ways"),
    [
        (
            chat(n=3, top_logprobs=4, max_tokens=100),
            "logprobs",
            "1350 log-probabilities, 5 for each of up to 270 tokens of output",
            f"{LESS}, or {SHORTER}",
        ),
        (
            completion(logprobs=1, logprob_token_ids=[1] * 128),
            "logprob_token_ids",
            "1290 log-probabilities, 129 for each of up to 10 tokens of output",
            f"{LESS}, or {SHORTER}",
        ),
        (
            completion(n=10, prompt_logprobs=10, logprobs=0),
            "prompt_logprobs",
            f"1200 log-probabilities, 1 for each of up to 100 tokens of output and {OF_PROMPTS}",
            f"{LESS}, or {SHORTER}, or {FEWER}",
        ),
        (
            completion(n=10, echo=True, logprobs=10, max_tokens=1, **STREAM),
            "echo",
            f"1100 log-probabilities, {OF_PROMPTS}",
            f"{LESS}, or {FEWER}",
        ),
    ],
)
def test_a_refusal_says_what_was_asked_and_what_to_do(request_, param, asked, ways):
    error = LIMIT.refusal(request_, rendered(request_, 10)).error
    assert (error.code, error.type, error.param) == (400, "invalid_request_error", param)
    assert error.message == f"the request asks for up to {asked}; {LIMITED}: {ways}"


def test_the_model_says_how_long_prompts_and_answers_are():
    model = SimpleNamespace(
        get_vocab_size=lambda: 7, max_model_len=64, get_diff_sampling_param=lambda: {"max_tokens": 5}
    )
    assert LogprobLimit.of(3, model) == LogprobLimit(3, vocabulary=7, max_model_len=64, max_tokens=5)
    model.get_diff_sampling_param = dict
    assert LogprobLimit.of(3, model).max_tokens is None


def test_by_default_an_answer_of_32k_tokens_with_five_each_passes():
    assert LimitsConfig().max_logprobs == MAX_LOGPROBS
    limit = LogprobLimit(MAX_LOGPROBS, vocabulary=100_000, max_model_len=32_768)
    for top_logprobs, is_refused in ((5, False), (6, True)):
        asked = chat(top_logprobs=top_logprobs, max_tokens=32_768)
        assert (limit.refusal(asked, rendered(asked, 10)) is not None) is is_refused
