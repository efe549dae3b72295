"""What is found out of a grammar when it is compiled, beside what that takes."""

import re
from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.slow
YES = StructuredOutputsParams(choice=["yes"])


async def is_refused(check, params, match, allowed=None):
    with pytest.raises(VLLMValidationError, match=match) as error:
        await check.check(params, allowed=allowed)
    assert error.value.parameter == "structured_outputs"


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(grammar="root ::= root"),
        StructuredOutputsParams(grammar="root ::= a\na ::= b\nb ::= a"),
        StructuredOutputsParams(json={"$ref": "#"}),
    ],
)
async def test_what_no_answer_can_conform_to_is_refused(check, params):
    for _ in range(2):
        await is_refused(
            check, params, "no answer can conform to what it must conform to: no token can begin"
        )


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(grammar='root ::= ""'),
        StructuredOutputsParams(grammar='root ::= "" | root'),
        StructuredOutputsParams(grammar='root ::= a\na ::= b | "x" a\nb ::= a'),
        StructuredOutputsParams(regex="a?"),
    ],
)
async def test_an_empty_answer_and_one_without_an_end_can_be_begun(check, params):
    await check.check(params)


@pytest.mark.parametrize("name", ["xgrammar", "outlines"])
async def test_what_no_allowed_token_can_begin_is_refused(check_by, tokenizer, name):
    check, (y, n) = check_by(name), tokenizer.convert_tokens_to_ids(["y", "n"])
    for allowed in ([y], [n, y], [y, 10**6], None, [], [n] * 2000):  # vLLM itself refuses the last two
        await check.check(YES, allowed=allowed)
    for allowed in ([n], [tokenizer.eos_token_id, n], [10**6], [-1]):
        await is_refused(check, YES, "none of allowed_token_ids can begin", allowed)
    await check.check(StructuredOutputsParams(regex="y?"), allowed=[n])  # a client may have another end


async def test_an_object_is_held_against_allowed_tokens_too(check, tokenizer):
    brace, letter = tokenizer.convert_tokens_to_ids(["{", "a"])
    any_object = StructuredOutputsParams(json_object=True)
    await check.check(any_object, allowed=[brace])
    await is_refused(check, any_object, "none of allowed_token_ids can begin", [letter])


async def test_a_requests_allowed_tokens_are_held_against_its_grammar(check, tokenizer):
    async def generated(prompt, params, request_id):
        yield "token"

    client = SimpleNamespace(generate=generated)
    check.stand_before(client, pytest.fail)
    y, n = tokenizer.convert_tokens_to_ids(["y", "n"])
    good = SamplingParams(structured_outputs=YES, allowed_token_ids=[y])
    assert [output async for output in client.generate("hi", good, "r")] == ["token"]
    with pytest.raises(VLLMValidationError, match="none of allowed_token_ids"):
        await anext(client.generate("hi", SamplingParams(structured_outputs=YES, allowed_token_ids=[n]), "r"))


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (
            StructuredOutputsParams(regex="(é"),
            "Regex parsing error at position 3: The parenthesis is not closed.",
        ),
        (StructuredOutputsParams(regex="(?<=a)b"), "Lookbehind is not supported yet."),
        (StructuredOutputsParams(grammar="root ::= ä\nb ::= c"), "EBNF lexer error at line 1, column 10"),
        (
            StructuredOutputsParams(json={"pattern": "(?<=a)b", "type": "string"}),
            "Lookbehind is not supported",
        ),
        (StructuredOutputsParams(json={"enum": []}), "enum array must not be empty"),
    ],
)
async def test_what_does_not_compile_is_refused_with_the_librarys_words(check, params, why):
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match=re.escape(why)) as error:
            await check.check(params)
        assert re.fullmatch(
            r"what the answer must conform to does not compile: [A-Za-z].*", error.value.args[0]
        )
        assert error.value.parameter == "structured_outputs"
    await check.check(YES)


async def test_of_a_text_that_does_not_compile_only_so_much_is_told(check):
    with pytest.raises(VLLMValidationError, match="does not compile") as error:
        await check.check(StructuredOutputsParams(json="[" + "é\n" * 8000))
    assert len(str(error.value)) < 500


async def test_what_vllm_refuses_unread_is_left_to_it(check):
    """A grammar in Lark's form that xgrammar has none for."""
    await check.check(StructuredOutputsParams(grammar="start: a\na: /x"))
    assert check._child is None
