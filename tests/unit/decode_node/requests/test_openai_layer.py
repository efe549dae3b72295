"""What vLLM refuses makes no line in a decode replica's log; what fails does. Streams name the engine."""

import json
import logging
from types import SimpleNamespace

import pytest
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints import chat_utils
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.renderers import hf, mistral
from vllm.tokenizers import mistral as mistral_tokens

from benchmarks.harness.tiny_models import build_tiny_llama
from decode_node.requests import openai_layer
from decode_node.requests.underway import Call, Underway
from decode_node.spans import RequestSpans
from slo.request import ReplicaId

SERVING = "vllm.entrypoints.openai.{}.serving"


@pytest.fixture
def written():
    """What the loggers of vLLM's OpenAI layer have written since, by the filters of a decode replica."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    modules = chat_utils, hf, mistral, mistral_tokens
    names = *(each.__name__ for each in modules), *map(SERVING.format, ("completion", "chat_completion"))
    loggers = [logging.getLogger(name) for name in names]
    openai_layer.log_no_refusals()
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)
        logger.filters.clear()


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        ("no matter", []),
        ("{{ messages[1].role }}", [{"role": "user", "content": "hi"}]),
        ("{{ 1 + 'a' }}", [{"role": "user", "content": "hi"}]),
    ],
)
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_chat_that_its_template_refuses_makes_no_line(written, tmp_path, template, chat, with_mask):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(build_tiny_llama(tmp_path / "tiny"))
    template += "{% generation %}{% endgeneration %}"
    with pytest.raises(Exception, match=r"\w"):
        hf.safe_apply_chat_template(
            None, tokenizer, chat, chat_template=template, return_assistant_tokens_mask=with_mask
        )
    assert written == []


class MistralTokens:
    def apply_chat_template(self, messages, **_):
        raise KeyError("role")


def test_one_that_mistrals_template_refuses_makes_none_either(written):
    with pytest.raises(ValueError, match="role"):
        mistral.safe_apply_chat_template(MistralTokens(), [])
    assert written == []


def call(arguments):
    function = {"name": "secret " * 1_000, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "secret " * 10, "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"role": "user", "content": [{"type": "text", "text": None}]}, id="no text"),
        pytest.param(call("secret"), id="no JSON"),
        pytest.param(call("[]"), id="no object"),
    ],
)
def test_what_is_not_taken_of_a_message_makes_no_line(written, message):
    config = SimpleNamespace(
        multimodal_config=None, allowed_local_media_path="", allowed_media_domains=None, hf_config=None
    )
    chat_utils.parse_chat_messages([message], config, "string")
    mistral_tokens.truncate_tool_call_ids(SimpleNamespace(messages=[message]))
    assert written == []


@pytest.mark.parametrize("kind", ["completion", "chat_completion"])
@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (VLLMValidationError("a grammar does not compile"), 0),
        (QueueOverflowError(), 0),
        (RuntimeError("a defect"), 1),
        (TypeError("a defect"), 1),
    ],
    ids=repr,
)
def test_a_stream_that_is_refused_makes_no_line_and_one_that_fails_does(written, kind, error, lines):
    logging.getLogger(SERVING.format(kind)).error("Error in stream generator.", exc_info=error)
    assert len(written) == lines


def test_a_template_that_does_not_compile_is_told(written):
    error = TemplateSyntaxError("unexpected end", 1)
    logging.getLogger(hf.__name__).error("Error when compiling Jinja template", exc_info=error)
    assert len(written) == 1


class Engine:
    """Streams the events of two answers; the totals follow, as ingresses ask for them."""

    EVENTS = (
        'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
        'data: {"choices":[{"index":1,"text":"\\"finish_reason\\":\\"","finish_reason":null}]}\n\n',
        'data: {"choices":[{"index":1,"text":"b","finish_reason":"stop"}]}\n\n',
        'data: {"choices":[{"index":0,"text":"c","finish_reason":"length"}],"usage":{"total_tokens":9}}\n\n',
        'data: {"choices":[],"usage":{"total_tokens":9},"system_fingerprint":"f"}\n\n',
        "data: [DONE]\n\n",
    )

    def __init__(self, of_chats, of_completions):
        self._oai_serving_chat = SimpleNamespace(system_fingerprint=of_chats)
        self._oai_serving_completion = SimpleNamespace(system_fingerprint=of_completions)

    async def chat(self, request, info):
        for event in self.EVENTS:
            yield event

    completions = chat


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("fingerprint", [None, "vllm", 'one "of" ours'])
async def test_a_stream_begins_with_its_replica_and_each_of_its_answers_ends_with_the_engines_fingerprint(
    is_chat, fingerprint
):
    engine = Engine(fingerprint, "other") if is_chat else Engine("other", fingerprint)
    call = Call(None, None, is_chat=is_chat, token_ids=[], spans=RequestSpans(""))
    layer = openai_layer.OpenAILayer(ReplicaId("a"), engine)
    pieces = [piece async for piece in layer.answer(None, Underway(call, None))]
    assert [piece.replica for piece in pieces] == ["a", *[None] * 5], "the ingress knows"
    sent = [piece.text for piece in pieces]
    assert (sent[:2], sent[4:]) == ([*Engine.EVENTS[:2]], [*Engine.EVENTS[4:]])
    stamp = {} if fingerprint is None else {"system_fingerprint": fingerprint}
    for text, event in zip(sent[2:4], Engine.EVENTS[2:4], strict=True):
        assert text.endswith("}\n\n")
        said, made = (json.loads(each.removeprefix("data: ")) for each in (text, event))
        assert said == {**made, **stamp}
