"""Of real grammars only those by which a text can be read in many ways take too long to follow."""

import json
import time

import pytest
import xgrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from decode_node.grammars.bounded import MOST_S, TOKEN_S, BoundedGrammar

pytestmark = pytest.mark.slow

THOUGHT = {"thought": {"type": "string"}}
TOOLS = [
    {
        "type": "object",
        "properties": THOUGHT | {"name": {"const": f"tool{n}"}, "at": {"type": "integer"}},
        "required": ["thought", "name", "at"],
        "additionalProperties": False,
    }
    for n in range(20)
]
CALL = {"thought": "itisknownthere" * 100, "name": "tool7", "at": 1}


def told(value):
    return json.dumps(value, separators=(",", ":"))  # the tokenizer knows no space


@pytest.fixture
def follow(tokenizer):
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def follow(compile_it, text):
        """After how many tokens of a text its grammar takes too long, as an engine asks it; None for none."""
        compiled = compile_it(compiler)
        matcher = xgrammar.GrammarMatcher(compiled)
        bounded = BoundedGrammar(XgrammarGrammar(len(tokenizer), matcher, compiled))
        mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))
        for number, token in enumerate(tokenizer.convert_tokens_to_ids([*text])):
            bounded.fill_bitmask(mask, 0)
            assert bounded.accept_tokens("request", [token])
            if bounded.is_too_slow:
                return number
        return None

    return follow


@pytest.mark.parametrize(
    "compile_it",
    [
        lambda compiler: compiler.compile_grammar('root ::= s\ns ::= s s | "a"'),
        lambda compiler: compiler.compile_regex("(a*)*b"),
    ],
)
def test_an_answer_that_can_be_read_in_many_ways_ends_before_its_steps_are_long(follow, compile_it):
    before_s = time.thread_time()
    accepted = follow(compile_it, "a" * 4000)
    assert accepted < 2000
    assert time.thread_time() - before_s < 2 * (MOST_S + accepted * TOKEN_S)


@pytest.mark.parametrize(
    ("compile_it", "text"),
    [
        (lambda compiler: compiler.compile_json_schema(json.dumps({"anyOf": TOOLS})), told(CALL)),
        (lambda compiler: compiler.compile_json_schema('{"type": "object"}'), told({"a": [[1]] * 500})),
        (lambda compiler: compiler.compile_regex("[a-z]{1,3000}"), "a" * 3000),
        (lambda compiler: compiler.compile_grammar('root ::= s\ns ::= "a" s | "a"'), "a" * 4000),
    ],
)
def test_others_are_followed_to_their_end(follow, compile_it, text):
    assert follow(compile_it, text) is None
