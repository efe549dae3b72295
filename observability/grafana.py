"""Dashboards as Grafana 11 and later import them.

Owns the JSON. What is shown is in `observability.boards`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from observability.promql import exported
from telemetry.catalogue import KV_USAGE, SLO_TARGET

RATE: Final = "$__rate_interval"
"""The window of rates: Grafana makes it fit the scrape interval and the zoom."""
_COLUMNS: Final = 24
_SCHEMA: Final = 39
_DATA_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


class View(enum.StrEnum):
    """How a panel draws its queries; the values are Grafana's names."""

    LINES = "timeseries"
    HEATMAP = "heatmap"
    NUMBERS = "stat"


class Unit(enum.StrEnum):
    """What is drawn; the values are Grafana's names."""

    SECONDS = "s"
    RATIO = "percentunit"
    COUNT = "short"
    PER_SECOND = "reqps"
    PER_MINUTE = "opm"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel, and what its series are called; `{{label}}` stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture; `width` is in columns, of which a row has 24."""

    title: str
    unit: Unit
    queries: Sequence[Query]
    view: View = View.LINES
    meaning: str = ""
    width: int = 8


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard; `marks` are drawn as annotations wherever their expressions have a value."""

    name: str
    title: str
    rows: Sequence[PanelRow]
    marks: Sequence[Query] = ()

    def expressions(self) -> Iterator[str]:
        """All its queries, with Grafana's variables in them."""
        yield from (mark.expr for mark in self.marks)
        yield from (query.expr for row in self.rows for panel in row.panels for query in panel.queries)


def as_json(board: Dashboard) -> str:
    """The file to import."""
    values = {
        "uid": f"slackserve-{board.name.replace('_', '-')}",
        "title": f"SlackServe / {board.title}",
        "tags": ["slackserve"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["slackserve"], "title": "SlackServe", "keepTime": True}
            | {"asDropdown": True, "includeVars": True}
        ],
        "annotations": {"list": [_mark(mark) for mark in board.marks]},
        "templating": {"list": list(_variables())},
        "panels": list(_panels(board.rows)),
    }
    return json.dumps(values, indent=1) + "\n"


def _panels(rows: Sequence[PanelRow]) -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for row in rows:
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": []} | {
            "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        }
        number, top, left = number + 1, top + 1, 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + 8
            yield _panel(panel, number) | {"gridPos": {"h": 8, "w": panel.width, "x": left, "y": top}}
            number, left = number + 1, left + panel.width
        top += 8


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    drawn: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
    return {
        "id": number,
        "type": panel.view.value,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _DATA_SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATA_SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "format": "heatmap" if panel.view is View.HEATMAP else "time_series",
                "instant": panel.view is View.NUMBERS,
                "range": panel.view is not View.NUMBERS,
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit.value,
                "custom": drawn if panel.view is View.LINES else {},
            },
            "overrides": [],
        },
        "options": _options(panel),
    }


def _options(panel: Panel) -> dict[str, Any]:
    match panel.view:
        case View.LINES:
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case View.HEATMAP:
            return {
                "calculate": False,
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "yAxis": {"unit": panel.unit.value},
                "tooltip": {"mode": "single", "yHistogram": True},
            }
        case View.NUMBERS:
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "none",
                "textMode": "value_and_name",
            }


def _mark(mark: Query) -> dict[str, Any]:
    return {
        "name": "Policy changes",
        "datasource": _DATA_SOURCE,
        "enable": True,
        "iconColor": "purple",
        "expr": mark.expr,
        "titleFormat": mark.legend,
        "step": "1m",
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, metric in (("model", SLO_TARGET), ("tier", SLO_TARGET), ("replica", KV_USAGE)):
        query = f"label_values({exported(metric)}, {name})"
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _DATA_SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
