"""How much a body may have beside what is answered: hints, names and settings, which are no prompt.

What is prompt is counted where a request is admitted, and lists and grammars have limits of their own; what
is neither would cost memory that nobody has reckoned with, for as long as the answer takes. Owns these sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from slo.errors import FieldError

_METADATA_PAIRS: Final = 16
_KEY_CHARACTERS: Final = 64
_TEXT_CHARACTERS: Final = 512
"""The three are OpenAI's limits of `metadata`; the last is also ours for each of the texts below."""
_TEXTS: Final = (
    "cache_salt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "session_id",
    "user",
)
_COUNTED: Final = frozenset(
    {
        *("messages", "prompt", "input", "instructions", "tools", "documents", "chat_template_kwargs"),
        *("structured_outputs", "response_format", "text", "stop", "bad_words"),
        *("system", "output_config", "stop_sequences"),
        *("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias", "tokens"),
        "metadata",
    }
)
"""Fields whose size is bounded or reckoned with elsewhere."""
_MOST_CHARACTERS: Final = 16 * 1024
"""Of all other fields together."""
_SCALAR_CHARACTERS: Final = 8


def refuse_large_hints(values: Mapping[str, Any]) -> None:
    """Refuse a body with more than may be beside the prompt.

    Raises:
        FieldError: naming the field.
    """
    _check_metadata(values.get("metadata"))
    for name in _TEXTS:
        value = values.get(name)
        if isinstance(value, str) and len(value) > _TEXT_CHARACTERS:
            raise FieldError(name, f"has {len(value)} characters", f"give at most {_TEXT_CHARACTERS}")
    left = _MOST_CHARACTERS
    for name, value in values.items():
        if name not in _COUNTED and (left := left - _characters(value, left)) < 0:
            raise FieldError(
                name,
                f"takes the fields beside the prompt beyond {_MOST_CHARACTERS} characters",
                "send less",
            )


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise FieldError("metadata", "is not an object", "give texts by name")
    if len(metadata) > _METADATA_PAIRS:
        raise FieldError("metadata", f"has {len(metadata)} pairs", f"give at most {_METADATA_PAIRS}")
    for key, value in metadata.items():
        if len(key) > _KEY_CHARACTERS:
            problem = f"has a key of {len(key)} characters"
            raise FieldError("metadata", problem, f"give keys of at most {_KEY_CHARACTERS}")
        if isinstance(value, dict | list):
            raise FieldError(f"metadata.{key}", "is not text", "give text")
        if isinstance(value, str) and len(value) > _TEXT_CHARACTERS:
            raise FieldError(
                f"metadata.{key}", f"has {len(value)} characters", f"give at most {_TEXT_CHARACTERS}"
            )


def _characters(value: Any, most: int) -> int:
    """About how many characters a value has in JSON; of one with more than `most`, some number above that."""
    size, rest = 0, [value]
    while rest and size <= most:
        one = rest.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            size += sum(map(len, one))
            rest += one.values()
        elif isinstance(one, list):
            rest += one
        else:
            size += _SCALAR_CHARACTERS
    return size
