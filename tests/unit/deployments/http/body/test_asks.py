"""What one request may ask for."""

import pytest
from bodies import LIMITS, TOOL, chat, completion, model

from decode_node.rendering import LocalReason, has_media, render
from deployments.http.body import asks
from deployments.http.body.prompt_size import refuse_too_long
from deployments.http.placing.prefix_hashes import prefix_hashes
from slo.admission.tenants import ANONYMOUS, Tenant, cache_salt, server_secret
from slo.errors import FieldError

DESCRIBED = {
    "type": "function",
    "function": {"name": "g", "description": "what it is for " * 100, "parameters": {"type": "object"}},
}
"""What it is for is part of the prompt, and of no grammar."""


def strict(tool):
    return {**tool, "function": {**tool["function"], "strict": True}}


def chosen(name):
    return {"type": "function", "function": {"name": name}}


def repetition(longest, times):
    return {"max_pattern_size": longest, "min_count": times}


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (completion(n=17), "n", "asks for 17 answers, prompts times n; limits.max_sequences allows 16"),
        (completion(n=4, prompt=["a"] * 5), "n", "asks for 20 answers, prompts times n"),
        (completion(prompt=[[1, 2]] * 17), "prompt", "asks for 17 answers, prompts times n"),
        (chat(n=17), "n", "asks for 17"),
        (chat(stop_token_ids=[1] * 65), "stop_token_ids", "limits.max_stop_tokens allows 64"),
        (completion(bad_words=["a"] * 65), "bad_words", "asks for 65 texts; limits.max_bad_words allows 64"),
        (chat(stop="\u00e9" * 2049), "stop", "asks for 4098 bytes; limits.max_stop_bytes allows 4096"),
        (completion(bad_words=["a" * 3000] * 2), "bad_words", "limits.max_stop_bytes allows 4096"),
        (completion(allowed_token_ids=[1] * 1025), "allowed_token_ids", "limits.max_token_ids allows 1024"),
        (chat(logit_bias={str(token): 1.0 for token in range(1025)}), "logit_bias", "asks for 1025 token"),
        (
            completion(logprobs=129, logprob_token_ids=[1] * 129),
            "logprob_token_ids",
            "asks for 129 token ids; give at most 128",
        ),
        (
            completion(n=8, prompt=["a", "b"], logprobs=1, logprob_token_ids=[1] * 9),
            "logprob_token_ids",
            "asks for 144 token ids, counted once for each answer; give at most 128",
        ),
        (
            chat(n=5, bad_words=["a"] * 52),
            "bad_words",
            "asks for 260 texts, counted once for each answer; limits.max_bad_words allows 256 for all",
        ),
        (
            chat(repetition_detection=repetition(21, 2)),
            "repetition_detection",
            "max_pattern_size of 21; give at",
        ),
        (completion(repetition_detection=repetition(20, 5)), "repetition_detection", "compares 100 tokens"),
        (
            chat(repetition_detection=repetition(1, 10**9)),
            "repetition_detection",
            "compares 1000000000 tokens",
        ),
        (
            completion(max_tokens=101),
            "max_tokens",
            "asks for 101 tokens; limits.max_output_tokens allows 100",
        ),
        (chat(max_completion_tokens=101), "max_completion_tokens", "asks for 101 tokens"),
        (chat(min_tokens=101), "min_tokens", "asks for 101 tokens"),
        (completion(n=-1), "n", "is -1; give 1 or more"),
        (chat(n=0), "n", "is 0; give 1 or more"),
        (completion(max_tokens=-1), "max_tokens", "is -1; give 0 or more"),
        (chat(max_completion_tokens=-(10**12)), "max_completion_tokens", "give 0 or more"),
        (chat(min_tokens=-1), "min_tokens", "give 0 or more"),
        (completion(prompt=[]), "prompt", "is empty; give text or token ids"),
        (completion(prompt=[[]]), "prompt", "is empty; give text or token ids"),
        (completion(prompt=[[1], []]), "prompt", "is empty; give text or token ids"),
    ],
)
def test_what_is_too_much(body, field, message):
    with pytest.raises(FieldError) as refused:
        asks.refuse_excess(body, LIMITS)
    assert refused.value.field == field
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structured_outputs": {"regex": "a" * 300}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a" * 150, "b" * 150]}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n" * 300, "schema": {}}}},
            "response_format",
        ),
        ({"response_format": {"type": "structural_tag", "format": {"text": "t" * 300}}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [strict(TOOL)]}, "tools"),
        ({"tools": [DESCRIBED, TOOL], "tool_choice": chosen("f")}, "tools"),
    ],
)
def test_large_grammars_are_refused_before_anybody_reads_them(fields, field):
    with pytest.raises(FieldError, match=r"bytes of grammar; limits.max_grammar_bytes allows 300") as refused:
        chat(**fields)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "body",
    [
        completion(n=16),
        completion(n=2, prompt=["a"] * 8, max_tokens=100),
        completion(prompt=[1] * 1000),
        completion(structured_outputs={"regex": "a" * 40}),
        completion(stop="a" * 4096, bad_words=["a" * 64] * 64, stop_token_ids=[1] * 64),
        chat(stop=["a"] * 4, logit_bias={str(token): 1.0 for token in range(1024)}),
        completion(allowed_token_ids=[1] * 1024, logprobs=128, logprob_token_ids=[1] * 128),
        completion(n=16, logprobs=1, logprob_token_ids=[1] * 8, bad_words=["a"] * 16),
        completion(n=2, prompt=["a"] * 2, bad_words=["a"] * 64),
        chat(repetition_detection=repetition(20, 4)),
        completion(repetition_detection=repetition(0, 10**9)),
        chat(tools=[TOOL]),
        chat(tools=[DESCRIBED, TOOL], tool_choice=chosen("g")),
        chat(tools=[DESCRIBED], tool_choice="required"),
        chat(tools=[strict(DESCRIBED), TOOL]),
        chat(tools=[strict(TOOL)], tool_choice="none"),
    ],
)
def test_a_request_within_the_limits_is_not_refused(body):
    asks.refuse_excess(body, LIMITS)


STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True, "parameters": {}}}
PLAIN = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("body", "is_decodes"),
    [
        (completion(), False),
        (completion(structured_outputs={"regex": "a*"}), True),
        (completion(response_format={"type": "text"}), False),
        (completion(response_format={"type": "json_object"}), True),
        (chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}), True),
        (chat(tools=[PLAIN]), False),
        (chat(tools=[PLAIN], tool_choice="auto"), False),
        (chat(tools=[PLAIN], tool_choice="none"), False),
        (chat(tools=[PLAIN], tool_choice="required"), True),
        (chat(tools=[PLAIN], tool_choice={"type": "function", "function": {"name": "f"}}), True),
        (chat(tools=[STRICT], tool_choice="auto"), True),
        (chat(tools=[STRICT], tool_choice="none"), False),
        (chat(thinking_token_budget=5), True),
    ],
)
def test_whose_first_token_it_is(body, is_decodes):
    assert asks.decode_samples_first(body) is is_decodes


FORMAT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (completion(), None),
        (completion(response_format=FORMAT), "response_format"),
        (completion(response_format=FORMAT, structured_outputs={"regex": "a*"}), "structured_outputs"),
        (chat(response_format=FORMAT, tools=[STRICT]), "response_format"),
        (chat(response_format={"type": "text"}, tools=[STRICT]), "tools"),
        (chat(response_format=FORMAT, tools=[PLAIN], tool_choice="required"), "tools"),
        (chat(response_format=FORMAT, tools=[PLAIN], tool_choice="none"), "response_format"),
    ],
)
def test_which_field_has_the_grammar(body, field):
    assert asks.grammar_field(body) == field


def said(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "hi"}, *parts]}]


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (completion(), None),
        (completion(prompt="a", n=1, best_of=1), None),
        (completion(prompt=["a"]), None),
        (completion(prompt=[1, 2, 3]), None),
        (completion(n=2), LocalReason.SEVERAL_SEQUENCES),
        (completion(use_beam_search=True), LocalReason.SEVERAL_SEQUENCES),
        (completion(prompt=["a", "b"]), LocalReason.SEVERAL_PROMPTS),
        (completion(prompt=[[1], [2]]), LocalReason.SEVERAL_PROMPTS),
        (completion(prompt_logprobs=0), LocalReason.PROMPT_LOGPROBS),
        (completion(logprobs=1), None),
        (completion(echo=True), None),
        (completion(echo=True, logprobs=1), LocalReason.PROMPT_LOGPROBS),
        (chat(), None),
        (chat(n=3), LocalReason.SEVERAL_SEQUENCES),
        (chat(logprobs=True, top_logprobs=2), None),
        (chat(echo=True), LocalReason.PROMPT_LOGPROBS),
        (chat(messages=said()), None),
        (chat(messages=said(PICTURE)), LocalReason.NOT_TEXT),
        (chat(messages=said({"image_url": "data:image/png;base64,AAAA"})), LocalReason.NOT_TEXT),
        (
            chat(messages=said({"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}})),
            LocalReason.NOT_TEXT,
        ),
    ],
)
async def test_what_only_decode_can_compute_is_known_as_decode_knows_it(body, why):
    class Layer:
        """vLLM's renderer, of a model that has eyes and ears."""

        def __init__(self):
            self._oai_serving_chat = self._oai_serving_completion = self

        async def render_chat_request(self, request):
            return [], [{"type": "multimodal" if has_media(request) else "token", "prompt_token_ids": [1]}]

        async def render_completion_request(self, request):
            return [{"type": "token", "prompt_token_ids": [1]}] * asks.prompts(request)

    asks.materialise(body)
    is_chat = hasattr(body, "messages")
    rendered = await render(Layer(), body, is_chat=is_chat, max_model_len=64_000)
    assert rendered.local is why
    assert asks.only_decode(body) is (why is not None)
    if why is not None:
        several = 1 if getattr(body, "use_beam_search", False) else asks.answers_per_prompt(body)
        assert rendered.prompts == asks.prompts(body) * several


def test_where_the_length_is_not_known_nothing_is_too_long_and_what_is_named_is_reserved():
    refuse_too_long(completion(prompt=[1] * 60_000), None)
    for named, counts in ((50_000, 50_000), (1 << 60, 1 << 24), (None, 32_768)):
        body = chat() if named is None else chat(max_tokens=named)
        assert asks.output_tokens(body, model()) == counts


DIGESTS = [b"of acme's key", b"of zenith's"]
SECRET = server_secret(DIGESTS)
ACME, ZENITH = (Tenant(name, cache_salt=cache_salt(SECRET, f"tenant {name}")) for name in ("acme", "zenith"))
LONG = "a prefix that is worth guessing " * 100


def hashes(tenant, **fields):
    body = completion(prompt=LONG, **fields)
    asks.keep_apart(body, tenant)
    return body.cache_salt, prefix_hashes(body).hashes


def test_a_tenant_finds_nothing_of_anothers():
    (salt, own), (other_salt, others) = hashes(ACME), hashes(ZENITH)
    assert salt != other_salt
    assert own
    assert not {*own} & {*others}
    assert hashes(ACME) == (salt, own)


def test_a_clients_own_salt_keeps_apart_within_a_tenant():
    assert not {*hashes(ACME)[1]} & {*hashes(ACME, cache_salt="mine")[1]}
    assert not {*hashes(ACME, cache_salt="mine")[1]} & {*hashes(ZENITH, cache_salt="mine")[1]}
    # Who knows another's salt still cannot name it: theirs stands before it.
    assert not {*hashes(ZENITH, cache_salt=ACME.cache_salt)[1]} & {*hashes(ACME)[1]}


def test_without_keys_everybody_shares():
    assert hashes(ANONYMOUS) == (None, prefix_hashes(completion(prompt=LONG)).hashes)


def test_a_salt_is_the_same_in_every_process_and_needs_the_keys():
    assert cache_salt(server_secret(DIGESTS[::-1]), "tenant acme") == ACME.cache_salt
    assert cache_salt(server_secret(DIGESTS[:1]), "tenant acme") != ACME.cache_salt


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (completion(), 16),
        (completion(max_tokens=30, n=2, prompt=["a", "b", "c"]), 180),
        (completion(prompt=[[1], [2]], max_tokens=7), 14),
        (chat(), 100),
        (chat(max_completion_tokens=5, n=3), 15),
        (completion(max_tokens=0, echo=True), 1),
        (chat(min_tokens=5), 100),
    ],
)
def test_the_most_that_all_answers_may_have(body, tokens):
    assert asks.output_tokens(body, model(4096, LIMITS.max_output_tokens)) == tokens


def test_a_request_that_names_no_limit_may_have_what_the_model_takes():
    assert asks.output_tokens(chat(), model(4096)) == 4096


@pytest.mark.parametrize("max_model_len", [None, 4096])
@pytest.mark.parametrize(
    ("body", "tokens"),
    [(chat(), 30), (chat(n=2), 60), (chat(max_tokens=50), 50), (chat(max_tokens=90), 80), (completion(), 16)],
)
def test_an_answer_has_no_more_than_the_model_or_an_operator_says(body, tokens, max_model_len):
    """The model says it for requests that name no limit, an operator for all."""
    assert asks.output_tokens(body, model(max_model_len, 80, max_tokens=30)) == tokens
