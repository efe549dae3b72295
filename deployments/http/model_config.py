"""A model as the ingress is told of it.

Owns what bounds its answers, as far as that is known before a replica has a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model, as the ingress is told of it.

    Attributes:
        name: Of its replicas; requests may name it, or one of its adapters.
        max_model_len: Longest prompt plus output, tokens; None where only its replicas know it.
        max_output_tokens: The most that any answer has; None for what the model takes.
        sampled_with: The `temperature`, `top_p` and `max_tokens` of answers whose requests do not say them,
            where the model does.
        shows_usage: Whether all its streams say their usage in each event, whoever asks.
    """

    name: str
    max_model_len: int | None
    max_output_tokens: int | None
    sampled_with: Mapping[str, float]
    shows_usage: bool

    def output_bounds(self, named: int | None, prompt_tokens: int = 0) -> list[int]:
        """Numbers of tokens that an answer does not exceed, by vLLM's rule; none where none is known.

        Args:
            named: The most that its request names; None where it names none.
            prompt_tokens: What its prompt takes of the model's length.
        """
        room = None if self.max_model_len is None else self.max_model_len - prompt_tokens
        most = self.sampled_with.get("max_tokens") if named is None else named
        bounds = most, self.max_output_tokens, room
        return [int(bound) for bound in bounds if bound is not None]
