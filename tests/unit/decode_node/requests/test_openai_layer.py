"""What vLLM refuses makes no line in the log of a decode replica; what fails does."""

import logging

import pytest
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.renderers import hf, mistral

from benchmarks.harness.tiny_models import build_tiny_llama
from decode_node.requests import openai_layer

SERVING = "vllm.entrypoints.openai.{}.serving"


@pytest.fixture
def written():
    """What the loggers of vLLM's OpenAI layer have written since, by the filters of a decode replica."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    names = hf.__name__, mistral.__name__, *map(SERVING.format, ("completion", "chat_completion"))
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
