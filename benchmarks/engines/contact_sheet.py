"""Draws the dashboards from a running Prometheus: each panel by its own queries, a sheet for each board.

python -m benchmarks.engines.contact_sheet --prometheus http://127.0.0.1:9090 --minutes 5 --out docs/img
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the choice of what draws

from observability.boards import BOARDS
from observability.grafana import Dashboard, Panel, Query, View

_COLUMNS = 3
_STEP_S = 2
_MAX_SERIES = 8


class Source:
    """The last minutes of a Prometheus."""

    def __init__(self, url: str, minutes: float) -> None:
        self._url = url
        self._until_s = time.time()
        self._since_s = self._until_s - 60 * minutes

    def series(self, query: Query) -> list[tuple[str, list[float], list[float], dict[str, str]]]:
        """Name, seconds, values and labels of each series of a query with everything chosen."""
        chosen = {"__rate_interval": "1m", "model": ".*", "tier": ".*", "replica": ".*"}
        expr = re.sub(r"\$(\w+)", lambda found: chosen[found[1]], query.expr)
        asked = {"query": expr, "start": self._since_s, "end": self._until_s, "step": _STEP_S}
        with urllib.request.urlopen(  # noqa: S310 - our own localhost
            f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        ) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return [
            (
                re.sub(r"{{(\w+)}}", lambda name, it=each: it["metric"].get(name[1], ""), query.legend),
                [float(at_s) - self._since_s for at_s, _ in each["values"]],
                [float(value) for _, value in each["values"]],
                each["metric"],
            )
            for each in found
        ]


def draw(board: Dashboard, source: Source, path: Path) -> None:
    """All panels of a board on one sheet."""
    panels = [panel for row in board.rows for panel in row.panels]
    rows = math.ceil(len(panels) / _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(16, 2.7 * rows), squeeze=False, layout="constrained")
    figure.suptitle(f"SlackServe / {board.title}", fontsize=14)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, source)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=70)
    plt.close(figure)


def _draw_panel(axis: plt.Axes, panel: Panel, source: Source) -> None:
    axis.set_title(f"{panel.title} [{panel.unit.value}]", fontsize=9, loc="left")
    axis.tick_params(labelsize=7)
    series = [each for query in panel.queries for each in source.series(query)]
    if not series:
        axis.text(0.5, 0.5, "no data", ha="center", va="center", color="grey", transform=axis.transAxes)
        return
    if panel.view is View.HEATMAP:
        _draw_heat(axis, series)
        return
    for name, seconds, values, _ in series[:_MAX_SERIES]:
        axis.plot(seconds, values, linewidth=1, label=name or None)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    if any(name for name, *_ in series):
        axis.legend(fontsize=6, loc="upper left", ncols=2)


def _draw_heat(axis: plt.Axes, series: list[tuple[str, list[float], list[float], dict[str, str]]]) -> None:
    """Buckets are cumulative; what is drawn is what lies in each."""
    buckets = sorted(series, key=lambda each: float(each[3]["le"]))
    times = sorted({at_s for _, seconds, _, _ in buckets for at_s in seconds})
    below = [dict(zip(seconds, values, strict=True)) for _, seconds, values, _ in buckets]
    cells = [
        [upper.get(at_s, 0.0) - lower.get(at_s, 0.0) for at_s in times]
        for lower, upper in zip([{}, *below], below, strict=False)
    ]
    axis.pcolormesh(times, range(len(buckets)), cells, cmap="Oranges", shading="nearest")
    axis.set_yticks(range(0, len(buckets), 4), [each[3]["le"] for each in buckets[::4]])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    given = parser.parse_args()
    source = Source(given.prometheus, given.minutes)
    for board in BOARDS:
        draw(board, source, given.out / f"dashboard_{board.name}.png")


if __name__ == "__main__":
    main()
