"""Dashboards show every metric, ask nothing that Prometheus cannot parse, and are what Grafana imports."""

import itertools
import json
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml
from dashboards import filled
from promtool import needs_promtool

from deployments.http import accounting
from observability.boards import BOARDS
from observability.boards.queries import filters
from observability.grafana import as_json
from observability.promql import exported
from router.serve import model_router
from telemetry.catalogue import (
    ALL,
    MONITOR,
    SLACK_AT_FIRST_TOKEN,
    SLO_JUDGED,
    SLO_TARGET,
    MetricKind,
)

ROOT = Path(__file__).parents[3]
BY_NAME = {board.name: board for board in BOARDS}
NOT_SHOWN = {}
"""Metrics that are on no board, with the reason."""


@pytest.fixture(params=BY_NAME)
def board(request):
    return BY_NAME[request.param]


@pytest.fixture
def imported(board):
    return json.loads(as_json(board))


def panels(imported):
    return [panel for panel in imported["panels"] if panel["type"] != "row"]


def test_every_metric_is_on_a_board_or_left_out_by_name():
    shown = set(re.findall(r"[a-z_]+", " ".join(expr for board in BOARDS for expr in board.expressions())))
    missing = set()
    for metric in (*ALL, *MONITOR):
        name = exported(metric)
        parts = (f"{name}_bucket", f"{name}_count") if metric.kind is MetricKind.HISTOGRAM else (name,)
        if not shown & set(parts):
            missing.add(metric.name)
    assert missing == set(NOT_SHOWN)


@pytest.mark.parametrize(
    "metric",
    dict.fromkeys((*accounting.METRICS, *model_router.METRICS)),
    ids=lambda metric: metric.name,
)
def test_what_an_ingress_or_the_router_records_is_not_asked_of_a_replica_of_the_tiers(metric):
    assert "replica" not in filters(metric)


def test_the_policys_burn_rate_is_the_one_that_it_acts_on():
    shown = {panel.title: panel.queries for row in BY_NAME["slo_overview"].rows for panel in row.panels}
    (query,) = shown["Burn rate that the policy acts on"]
    assert query.expr.startswith("slackserve_slo_burn_rate_in_reach{")


def scraped(page):
    """The jobs that a page of the documentation has Prometheus scrape."""
    for block in re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        parts = yaml.safe_load(textwrap.dedent(block))
        yield from parts.get("scrape_configs", ()) if isinstance(parts, dict) else ()


def test_what_the_documentation_has_scraped_is_often_enough_for_rates():
    jobs = [job for page in sorted((ROOT / "docs").rglob("*.md")) for job in scraped(page)]
    assert len(jobs) >= 2  # Ray's metrics, and the SLO monitor's
    assert all(int(job.get("scrape_interval", "60s").removesuffix("s")) <= 15 for job in jobs)


@needs_promtool
def test_prometheus_parses_every_expression(board, tmp_path):
    rules = [
        {"record": f"test:expression{number}", "expr": filled(expr)}
        for number, expr in enumerate(board.expressions())
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "test", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", path], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
@pytest.mark.parametrize(("negative", "fraction"), [(None, 0), ("0+5x80", 0.25)])
def test_the_fraction_of_late_first_tokens_is_zero_before_the_first(negative, fraction, tmp_path):
    """Ray exports the series of a sign only once there was one of it."""
    name = f"{exported(SLACK_AT_FIRST_TOKEN)}_count"
    signs = {"positive": "0+15x80", "negative": negative}
    series = [
        {"series": f'{name}{{model="m",served="m",tier="premium",sign="{sign}"}}', "values": values}
        for sign, values in signs.items()
        if values is not None
    ]
    shown = {panel.title: panel.queries for row in BY_NAME["request_path"].rows for panel in row.panels}
    (query,) = shown["First tokens that were late"]
    sample = {"labels": '{tier="premium"}', "value": fraction}
    asked = {"expr": filled(query.expr), "eval_time": "15m", "exp_samples": [sample]}
    path = tmp_path / "test.yaml"
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [asked]}
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    command = ["promtool", "test", "rules", path]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_means_are_nowhere_as_rays_sums_are_approximate(board):
    assert not [expr for expr in board.expressions() if "_sum" in expr]


def test_only_variables_that_there_are_are_used(board, imported):
    known = {variable["name"] for variable in imported["templating"]["list"]} | {"__rate_interval"}
    assert {"datasource", "model", "tier", "replica"} <= known
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(imported))) - {"__all"}
    assert used <= known


def test_a_model_that_can_be_chosen_has_budgets_and_is_not_an_adapter(imported):
    (chosen,) = [variable for variable in imported["templating"]["list"] if variable["name"] == "model"]
    assert chosen["definition"] == "label_values(slackserve_slo_target_ratio, model)"
    assert filters(SLO_JUDGED, met="no") == {"served": "~$model", "tier": "~$tier", "met": "no"}
    assert filters(SLO_TARGET) == {"model": "~$model", "tier": "~$tier"}


def test_panels_have_ids_of_their_own_and_do_not_overlap(imported):
    ids = [panel["id"] for panel in imported["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in imported["panels"]:
        at = panel["gridPos"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_asks_the_chosen_data_source(imported):
    for panel in panels(imported):
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_a_heat_map_asks_for_buckets_in_their_order(imported):
    for panel in panels(imported):
        if panel["type"] == "heatmap":
            (target,) = panel["targets"]
            assert target["format"] == "heatmap"
            assert "sum by (le)" in target["expr"]


def test_boards_are_told_apart():
    assert len({json.loads(as_json(board))["uid"] for board in BOARDS}) == len(BOARDS)
