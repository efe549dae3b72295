"""Parsers as an operator's own file registers them, each under the name `mine`."""

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.identity_reasoning_parser import IdentityReasoningParser
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser


@ReasoningParserManager.register_module("mine")
class MyReasoning(IdentityReasoningParser):
    """Finds no reasoning."""


@ToolParserManager.register_module("mine")
class MyCalls(Hermes2ProToolParser):
    """Finds calls as Hermes writes them."""
