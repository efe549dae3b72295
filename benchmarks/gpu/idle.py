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

    There are at most `rounds`; after `limit_s` none but the first is begun.
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
    return [
        {
            "variant": name,
            "tokens": len(prompt),
            "rounds": len(own),
            "bare_ms": statistics.median(times[BARE]) * 1e3,
            "ms": statistics.median(own) * 1e3,
            **overhead(own, times[BARE]),
        }
        for name, own in times.items()
        if name != BARE
    ]
