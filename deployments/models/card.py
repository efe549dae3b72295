"""What is told of a model, or of an adapter of it, at `/v1/models`: OpenAI's fields, and vLLM's.

Ray's card has less than clients of either read.
"""

from __future__ import annotations

import time

from ray.llm._internal.serve.core.configs.openai_api_models import ModelCard

from deployments.models.found import FoundModel


class Card(ModelCard):  # type: ignore[misc] # Ray ships no types for it
    """One entry of the list.

    Attributes:
        created: When the application was built, seconds since 1970.
        root: The model that this is, or is an adapter of.
        parent: Of an adapter, the same.
        max_model_len: Longest prompt and answer together, tokens; None where nobody knows it yet.
    """

    created: int
    root: str
    parent: str | None = None
    max_model_len: int | None = None


def card_of(name: str, model: FoundModel) -> Card:
    """The card of a model, by its own name or by that of an adapter."""
    metadata = {"model_id": name, "max_request_context_length": model.longest}
    parent = None if name == model.name else model.name
    if parent is not None:
        metadata["parent"] = parent
    return Card(
        id=name,
        object="model",
        owned_by="slackserve",
        permission=[],
        metadata=metadata,
        created=int(time.time()),
        root=model.name,
        parent=parent,
        max_model_len=model.longest,
    )
