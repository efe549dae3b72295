"""Files with an operator's own parsers of reasoning and tool calls, which vLLM's arguments name.

vLLM's server loads them before its engine starts. A replica has no such server, so they are loaded here, in
each process that makes an engine's configuration. Owns nothing of the parsers, which register themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from ray.serve.llm import LLMConfig
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

_REASONING: Final = "reasoning_parser_plugin"
_LOADED_BY: Final[Mapping[str, Callable[[str], None]]] = {
    _REASONING: ReasoningParserManager.import_reasoning_parser,
    "tool_parser_plugin": ToolParserManager.import_tool_parser,
}


class ConfigWithParsers(LLMConfig):  # type: ignore[misc] # Ray ships no types for it
    """What a tier's replicas are told, and on CUDA also the task of Ray's that configures their engines."""

    def get_engine_config(self) -> Any:
        """The engine's part of it, once its parsers are there."""
        load_parsers(self.engine_kwargs)
        return super().get_engine_config()


def parser_files(given: Mapping[str, Any]) -> dict[str, str]:
    """The files that engine arguments name, by argument."""
    grammars = given.get("structured_outputs_config")
    within = grammars if isinstance(grammars, Mapping) else getattr(grammars, "__dict__", {})
    named = {_REASONING: within.get(_REASONING)} | {key: given[key] for key in _LOADED_BY if given.get(key)}
    return {key: path for key, path in named.items() if isinstance(path, str) and path}


def load_parsers(given: Mapping[str, Any]) -> None:
    """Load the parsers of all these files; what one raises is in vLLM's log."""
    for key, path in parser_files(given).items():
        _load(key, path)


@cache
def _load(key: str, path: str) -> None:
    _LOADED_BY[key](path)
