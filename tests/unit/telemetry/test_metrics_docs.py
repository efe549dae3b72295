"""`docs/metrics.md` and the catalogue say the same."""

import re
from pathlib import Path

import pytest

from decode_node.carrying import BoundReason, ResampledReason
from decode_node.rendering import LocalReason
from router.messages import PlacementReason
from slo.decode.victims import TakenBy, VictimReason
from slo.errors import RejectionReason
from slo.monitor.directives import DirectiveReason
from slo.outcomes import Outcome
from slo.preemption.types import KeepReason, PreemptReason
from slo.replacement import FailureCause, ReplacementOutcome
from telemetry.catalogue import ALL, MONITOR, PREFILL, SLACK_AT_FIRST_TOKEN, TTFT, MetricKind

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def exported(metric):
    """The name that Prometheus shows."""
    prefix = "" if metric in MONITOR else "ray_"
    return f"{prefix}{metric.name}" + ("_total" if metric.kind is MetricKind.COUNTER else "")


def rows():
    """Cells of each table row that documents a metric of ours, by the name in the first cell."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.match(r"\| `(ray_)?slackserve_", line):
            name = cells[0].strip("`")
            assert name not in found, f"{name} has two rows"
            found[name] = cells
    return found


@pytest.mark.parametrize("metric", ALL + MONITOR, ids=lambda metric: metric.name)
def test_every_metric_has_a_row_with_its_type_unit_and_labels(metric):
    name = exported(metric)
    assert name in rows(), f"docs/metrics.md has no row for {name}"
    _, kind, unit, labels, meaning = rows()[name]
    assert kind == metric.kind.value
    assert unit == metric.unit
    assert set(re.findall(r"`(\w+)`", labels)) == set(metric.labels)
    assert (labels == "none") == (not metric.labels)
    assert meaning


@pytest.mark.parametrize("metric", [TTFT, SLACK_AT_FIRST_TOKEN, PREFILL], ids=lambda metric: metric.name)
def test_what_takes_until_morning_is_told_from_what_takes_minutes(metric):
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert [bound for bound in metric.buckets if bound > 120] == [300, 900, 3600, 14400]


def test_every_label_has_its_values_explained():
    _, _, explained = PAGE.partition("## Values of the labels")
    for label in {label for metric in ALL + MONITOR for label in metric.labels}:
        assert re.search(rf"^\| `{label}`", explained, re.MULTILINE), f"{label} is not explained"


@pytest.mark.parametrize(
    ("label", "reasons"),
    [
        ("`outcome`", set(Outcome)),
        ("`outcome` of replacements", set(ReplacementOutcome)),
        ("`cause` of replacements", set(FailureCause)),
        ("`reason` of resampled first tokens", set(ResampledReason)),
        ("`reason` of placements", set(PlacementReason)),
        ("`reason` of local prefills", set(LocalReason)),
        ("`outcome` of continuations", set(BoundReason)),
        ("`reason` of directives", set(DirectiveReason)),
        ("`reason` of preemptions", set(PreemptReason)),
        ("`reason` of streams preempted", set(VictimReason)),
        ("`by`", set(TakenBy)),
        ("`reason` of rejections", {*RejectionReason} - {RejectionReason.NOT_SETTLED}),
        ("`reason` of refusals", {*KeepReason} - {KeepReason.OFF, KeepReason.IDLE, KeepReason.NOBODY_WAITS}),
    ],
)
def test_every_reason_of_a_decision_is_named(label, reasons):
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {label} |"))
    assert {reason for reason in reasons if f"`{reason.value}`" in row} == reasons


def test_the_page_names_no_metric_that_does_not_exist():
    known = {exported(metric) for metric in ALL + MONITOR}
    for metric in ALL:
        if metric.kind is MetricKind.HISTOGRAM:
            known |= {f"{exported(metric)}_{part}" for part in ("bucket", "sum", "count")}
    named = set(re.findall(r"\b(?:ray_)?slackserve_[a-z_]*[a-z]", PAGE))
    assert named <= known, f"unknown: {', '.join(sorted(named - known))}"
