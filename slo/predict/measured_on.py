"""What times were measured on: a model, an accelerator, a number of ranks, a dtype.

Owns the comparison; times measured on one subject do not hold for another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured, or predicted; a part that is None is unknown and does not differ from any other.

    Attributes:
        model: Its id, as `slackserve serve --model` takes it; for a directory, its name.
        accelerator: Its name in the driver; "cpu" for none.
        tensor_parallel: Ranks of a replica.
        dtype: Of the weights, such as "bfloat16".
    """

    model: str | None = None
    accelerator: str | None = None
    tensor_parallel: int | None = None
    dtype: str | None = None

    def differences(self, other: Subject) -> tuple[str, ...]:
        """What differs, such as "dtype float32 is not bfloat16"; this one's value first."""
        pairs = ((part.name, getattr(self, part.name), getattr(other, part.name)) for part in fields(self))
        return tuple(
            f"{name} {mine} is not {its}"
            for name, mine, its in pairs
            if mine is not None and its is not None and mine != its
        )


UNKNOWN: Final = Subject()
ON_HOST: Final = "cpu"
"""The accelerator of a subject that has none."""


@dataclass(frozen=True, slots=True)
class Measurable:
    """A replica's answer to `slackserve calibrate`, which measures it.

    Attributes:
        subject: What is measured.
        max_model_len: Longest prompt plus output, tokens.
        block_tokens: Cached prefixes are multiples of this; 0 when prefixes are not cached.
        kv_bytes_per_token: KV bytes of one token on all ranks together.
    """

    subject: Subject
    max_model_len: int
    block_tokens: int
    kv_bytes_per_token: int
