"""Chats and text completions as the ingress reads them under limits that are soon exceeded, and models."""

from __future__ import annotations

import json
from typing import Any

from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from deployments.config.limits import LimitsConfig
from deployments.http.body import asks
from deployments.http.body.reading import parse
from deployments.http.model_config import ModelConfig

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


def model(max_model_len: int | None = None, at_most: int | None = None, **sampled_with: float) -> ModelConfig:
    """A model of which no more is known."""
    return ModelConfig("m", max_model_len, at_most, sampled_with, shows_usage=False)
