"""What has been measured so far, on disk after each part: a run that is cut keeps what it has."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from benchmarks import report

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Findings:
    """A JSON file with what it was measured on, and one list of rows for each part."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = report.about() | dict(about)
        self.results: dict[str, list[dict[str, Any]]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, *rows: dict[str, Any]) -> None:
        """Keep rows of a part, and write everything."""
        self.results.setdefault(part, []).extend(rows)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps({"about": self.about, "results": self.results}, indent=2) + "\n")
        os.replace(unfinished, self.path)  # noqa: PTH105 - atomic


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A plain table: the machine may have no library for one."""
    print(f"\n{title}")
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    for row in [columns, *rows]:
        cells = [cell.ljust(widths[at]) if at == 0 else cell.rjust(widths[at]) for at, cell in enumerate(row)]
        print("  ".join(cells), flush=True)
