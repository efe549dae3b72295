"""Checks with a tokenizer of a model that is served: Mistral's, of which the newer has 131,072 tokens."""

import json

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from decode_node.grammars.check import GrammarLimits
from deployments.config.limits import LimitsConfig

FILES = [
    ("tekken_240911.json", "tekken.json"),
    ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v3"),
]


@pytest.mark.slow
@pytest.mark.parametrize("files", FILES)
async def test_the_limits_hold(check_by, mistrals, files):
    check = check_by("xgrammar", mistrals(*files), GrammarLimits(timeout_s=0.3))
    wide = StructuredOutputsParams(regex="(.{1,400}é){1,40}")
    await check.check(StructuredOutputsParams(regex="[a-z]{3,5}"))
    with pytest.raises(VLLMValidationError, match="takes too long or too much memory"):
        await check.check(wide)


def tool_of_an_agent(number):
    """Under a kilobyte, with what clients' schemas have."""
    properties = {
        "path": {"type": "string", "description": "where it is " * 20},
        "order": {"type": "string", "enum": ["ascending", "descending", "newest", "none"]},
        "limit": {"type": "integer", "minimum": 0, "maximum": 1000},
        "names": {"type": "array", "items": {"type": "string"}},
        "options": {
            "type": "object",
            "properties": {"recursive": {"type": "boolean"}, "depth": {"type": ["integer", "null"]}},
            "required": ["recursive", "depth"],
            "additionalProperties": False,
        },
    }
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"name": f"tool_{number}", "parameters": {**parameters, "additionalProperties": False}}


@pytest.mark.slow
async def test_an_agents_tools_are_within_the_limits_by_default(check_by, mistrals):
    """One of thirty must be called: 26 KB of schemas."""
    tools = [tool_of_an_agent(number) for number in range(30)]
    assert len(json.dumps(tools)) < LimitsConfig().max_grammar_bytes
    names = (
        {"properties": {"name": {"const": tool["name"]}, "parameters": tool["parameters"]}} for tool in tools
    )
    calls = [{"type": "object", "required": ["name", "parameters"], **each} for each in names]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    check = check_by("xgrammar", mistrals(), GrammarLimits())
    await check.check(StructuredOutputsParams(json=json.dumps(schema)))


def test_the_limit_of_time_is_what_the_configuration_says():
    assert GrammarLimits().timeout_s == LimitsConfig().grammar_timeout_s
