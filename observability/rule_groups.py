"""What Prometheus' rule files consist of, and how they are written."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

RUNBOOK = "docs/runbook.md"
"""Has a heading for each alert."""


class Severity(enum.StrEnum):
    """Who is told of an alert: somebody at once, or somebody on the next working day."""

    PAGE = "page"
    TICKET = "ticket"


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """An expression that is evaluated beforehand, under a name of its own."""

    record: str
    expr: str

    def fields(self) -> dict[str, Any]:
        """As in a rule file."""
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True, slots=True)
class Alert:
    """An expression that has a value when something is wrong.

    Attributes:
        alert: Its name, and the heading of its section in the runbook.
        tier: The tier that it is about; empty for no certain one.
        for_: How long it has to last, in Prometheus' spelling; empty for no time.
        summary: What is wrong, in one sentence; may use Prometheus' templates.
    """

    alert: str
    expr: str
    severity: Severity
    summary: str
    for_: str = ""
    tier: str = ""

    def fields(self) -> dict[str, Any]:
        """As in a rule file."""
        lasts = {"for": self.for_} if self.for_ else {}
        return {
            "alert": self.alert,
            "expr": self.expr,
            **lasts,
            "labels": {"severity": self.severity.value} | ({"tier": self.tier} if self.tier else {}),
            "annotations": {"summary": self.summary, "runbook": f"{RUNBOOK}#{self.alert.lower()}"},
        }


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules that are evaluated together, one after the other; `interval` is in Prometheus' spelling."""

    name: str
    interval: str
    rules: Sequence[RecordingRule | Alert]


def as_yaml(groups: Sequence[RuleGroup], notes: Sequence[str]) -> str:
    """A rule file, with `notes` as comments at its head."""
    return _dumped(_fields(groups), notes)


def as_prometheus_rule(groups: Sequence[RuleGroup], notes: Sequence[str]) -> str:
    """The same as the object that the Prometheus operator takes."""
    labels = {"app.kubernetes.io/part-of": "slackserve"}
    value = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "slackserve", "labels": labels},
        "spec": _fields(groups),
    }
    return _dumped(value, notes)


def _fields(groups: Sequence[RuleGroup]) -> dict[str, object]:
    values = [
        {"name": group.name, "interval": group.interval, "rules": [rule.fields() for rule in group.rules]}
        for group in groups
    ]
    return {"groups": values}


def _dumped(value: Mapping[str, object], notes: Sequence[str]) -> str:
    head = "".join(f"# {note}\n" for note in notes)
    return head + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """Represent one text; part of yaml's interface."""
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)
