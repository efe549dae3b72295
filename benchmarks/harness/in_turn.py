"""Things to measure, of which one that fails takes no other along."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable


def in_turn(names: Iterable[str], measure: Callable[[str], None]) -> None:
    """Measure each; of one that fails the reason is told at once.

    Raises:
        SystemExit: at the end, naming those that failed.
    """
    failed = []
    for name in names:
        try:
            measure(name)
        except Exception as error:  # noqa: BLE001 - those behind it are measured all the same
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")
