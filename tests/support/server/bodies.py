"""Chats and text completions as the ingress reads them, under limits that a few hundred bytes exceed."""

from __future__ import annotations

import json
from typing import Any

from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from deployments.config.limits import LimitsConfig
from deployments.http.body import asks
from deployments.http.body.reading import parse

LIMITS = LimitsConfig(max_output_tokens=100, max_grammar_bytes=300)
MESSAGES = [{"role": "user", "content": "12345"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": "x" * 300}}}


def completion(**fields: Any) -> CompletionRequest:
    """A text completion."""
    return parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionRequest, LIMITS)


def chat(**fields: Any) -> ChatCompletionRequest:
    """A chat."""
    body = {"model": "m", "messages": MESSAGES, **fields}
    made = parse(json.dumps(body).encode(), ChatCompletionRequest, LIMITS)
    asks.materialise(made)
    return made
