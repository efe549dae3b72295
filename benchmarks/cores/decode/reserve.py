"""Of the KV memory that is kept for the top tier, how much is left unused while that tier does not hold it.

In the rest lower tiers start, and yield it. Virtual time: streams of `benchmarks.cores.pool_pressure` that
nothing else is reported of, on which the part was chosen, and the engines and streams of
`benchmarks.cores.decode.kept_memory`. Prints tables and writes results/cores/decode_reserve.json:

    python -m benchmarks.cores.decode.reserve
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from benchmarks.cores import pool_pressure
from benchmarks.cores.decode import kept_memory
from benchmarks.report import print_rows, write
from simulator.pressure.engine import Way
from simulator.pressure.ours import Ours
from slo.tiers import DEFAULT_TIERS

PARTS: Final = (1.0, 0.75, 0.5, 0.25, 0.0)
CHOSEN_ON: Final = range(4, 12)
"""Seeds of the streams."""


def leaving(part: float) -> Ours:
    """Our way with another part."""
    way = Ours(DEFAULT_TIERS)
    way.unused = part
    return way


def chosen_on() -> kept_memory.Streams:
    """Streams, each with half of the memory that an engine with enough of it holds at its fullest."""
    streams = []
    for seed in CHOSEN_ON:
        asked = pool_pressure.arrivals(seed)
        blocks = round(kept_memory.POOL * pool_pressure.fullest(asked))
        streams.append((asked, pool_pressure.on_a100(blocks, has_host=False)))
    return streams


WAYS: Final[Mapping[str, Callable[[], Way]]] = {
    **{peer: pool_pressure.WAYS[peer] for peer in kept_memory.PEERS},
    **{f"{part:.0%} unused": partial(leaving, part) for part in PARTS},
}


def main() -> None:
    """Simulate everything."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = []
    for name, streams in {"A100, chosen on": chosen_on(), **kept_memory.worlds()}.items():
        for label, way in WAYS.items():
            rows.append({"engine": name, "way": label, **kept_memory.means(way, streams)})
        print_rows(name, [row for row in rows if row["engine"] == name])
    settings = {"parts": PARTS, "chosen on seeds": [*CHOSEN_ON], "pool": kept_memory.POOL}
    print(write("cores/decode_reserve", {**settings, "rows": rows}))


if __name__ == "__main__":
    main()
