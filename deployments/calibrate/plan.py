"""What a calibration measures: prompt lengths, cached prefixes, and the prompts that test a profile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from slo.predict.handoff import HANDOFF_STEPS

SHORTEST: Final = 32
_RATIO: Final = 4
_LONGEST_HANDOFF: Final = 4096
_EVERY_THIRD: Final = 3


def default_lengths(max_model_len: int) -> tuple[int, ...]:
    """Prompt lengths to sweep: each four times the one before, and the longest that the model takes."""
    longest = max_model_len - 1
    lengths = []
    tokens = SHORTEST
    while tokens < longest / 1.5:
        lengths.append(tokens)
        tokens *= _RATIO
    return (*lengths, longest)


def prefixed(lengths: Sequence[int], max_model_len: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
    """(tokens, cached tokens before them) to sweep: short and long tails behind short and long prefixes.

    The prefixes are a quarter and a half of the longest prompt, in whole blocks; none where prefixes are not
    cached or no prompt is long enough.
    """
    if block_tokens == 0:
        return ()
    longest = min(max(lengths), max_model_len - 1)
    contexts = sorted({longest // part // block_tokens * block_tokens for part in (4, 2)} - {0})
    pairs = []
    for context in contexts:
        tails = [tokens for tokens in sorted(set(lengths)) if context + tokens < max_model_len]
        pairs += [(tokens, context) for tokens in sorted({*tails[:1], *tails[-1:]})]
    return tuple(pairs)


def handoff_lengths(lengths: Sequence[int], max_model_len: int) -> tuple[int, ...]:
    """Prompt lengths whose handoff is measured: a transfer is a straight line and needs no long ones.

    They are those of `lengths`, shortened where the answer would not fit into the model, and two at least.
    """
    longest = min(_LONGEST_HANDOFF, max_model_len - HANDOFF_STEPS)
    short = sorted({min(tokens, longest) for tokens in lengths})
    chosen = short if len(short) > 1 else [short[0] // 2, short[0]]
    return tuple(sorted({chosen[0], chosen[len(chosen) // 2], chosen[-1]}))


def lengths_to_check(
    max_model_len: int, block_tokens: int, count: int, seed: int
) -> tuple[tuple[int, int], ...]:
    """(tokens, cached tokens before them) of random prompts, every third behind a prefix.

    The lengths are spread evenly on a logarithmic scale.
    """
    drawn = random.Random(seed)  # noqa: S311 - not a secret
    longest = max_model_len - 1
    pairs = []
    for number in range(count):
        tokens = round(SHORTEST * (longest / SHORTEST) ** drawn.random())
        room = longest - tokens
        cached = block_tokens > 0 and number % _EVERY_THIRD == _EVERY_THIRD - 1
        pairs.append((tokens, drawn.randint(0, room) // block_tokens * block_tokens if cached else 0))
    return tuple(pairs)
