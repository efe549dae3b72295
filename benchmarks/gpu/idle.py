"""What boundaries cost that never stop anything.

Every variant and the bare decoder prefill the same prompt once in each round, in random order; a ratio is of
two passes of one round. The bare decoder runs twice, so that the table also says how much is noise.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.report import overhead

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from benchmarks.gpu.variants import Bench, Fitted, Prompt

BARE = "bare"
BARE_AGAIN = "bare again"


def idle_overhead(
    bench: Bench,
    variants: Sequence[Fitted],
    prompt: Prompt,
    rounds: int,
    limit_s: float,
    rng: random.Random,
) -> list[dict[str, Any]]:
    """A row for each variant, and one for the bare decoder against itself.

    Args:
        bench: The decoder.
        variants: What is compared with it.
        prompt: What is computed.
        rounds: At most so many.
        limit_s: No round is begun after so many seconds; one is done in any case.
        rng: Draws the order.
    """
    contenders: dict[str, Fitted | None] = {BARE: None, BARE_AGAIN: None}
    contenders |= {fitted.variant.name: fitted for fitted in variants}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    until_s = time.monotonic() + limit_s
    for done in range(rounds):
        if done and time.monotonic() > until_s:
            break
        for name in rng.sample(sorted(contenders), len(contenders)):
            bench.use(contenders[name])
            times[name].append(bench.seconds(contenders[name], prompt))
    return [_row(name, len(prompt), times[name], times[BARE]) for name in contenders if name != BARE]


def _row(name: str, tokens: int, own: list[float], bare: list[float]) -> dict[str, Any]:
    return {
        "variant": name,
        "tokens": tokens,
        "rounds": len(own),
        "bare_ms": statistics.median(bare) * 1e3,
        "ms": statistics.median(own) * 1e3,
        **overhead(own, bare),
    }
