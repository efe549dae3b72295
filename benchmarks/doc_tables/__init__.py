"""The tables of the documentation that are made from results, and where they stand.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. `make tables` makes all of
them anew, and a test fails when one differs from its result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.doc_tables import (
    autoscaling,
    comparison,
    decode,
    engines,
    failures,
    gpu,
    origins,
    preemption,
    presets,
    simulated,
)

_ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")))
_PLACE: Final = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
TABLES: Final[Mapping[str, Callable[[], str]]] = {
    **simulated.TABLES,
    **autoscaling.TABLES,
    **presets.TABLES,
    **comparison.TABLES,
    **engines.TABLES,
    **failures.TABLES,
    **preemption.TABLES,
    **decode.TABLES,
    **gpu.TABLES,
    **origins.TABLES,
}


def remade(text: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        KeyError: for a table that is not among `TABLES`.
    """
    return _PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n{place[4]}", text)
