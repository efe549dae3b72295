"""The rules hold across an upgrade from before there was the label `served`."""

import re

import pytest
from alert_rules import check, judged, promtool
from promtool import needs_promtool

from observability.burn_rates import BUDGET_LEFT
from slo.tiers import PREMIUM


def before(series):
    """As it was exported before it had the label `served`."""
    return re.sub(r'served="[^"]*",', "", series)


@needs_promtool
def test_an_upgrade_from_before_there_was_served_leaves_no_model_behind_that_nobody_judges(tmp_path):
    new = 'slackserve_slo_judged_total{model="%s",served="m",tier="premium"}'
    series = {
        before(new % "m"): "0+1x60 _x120",
        before(new % "adapter"): "0+1x60 _x120",
        new % "m": "_x61 0+1x120",
        'ray_slackserve_monitor_lost{model="m",deployment="Router"}': "0+0x180",
    }
    check(tmp_path, "1m", series, "SlackServeSliAbsent", dict.fromkeys(range(180), 0))


@needs_promtool
def test_an_old_monitor_under_new_rules_is_not_absent(tmp_path):
    series = {
        before('slackserve_slo_judged_total{model="m",served="m",tier="premium"}'): "0+1x90",
        'ray_slackserve_monitor_lost{model="m",deployment="Router"}': "0+0x90",
    }
    check(tmp_path, "1m", series, "SlackServeSliAbsent", {10: 0, 80: 0})


@needs_promtool
@pytest.mark.parametrize("misses_before", [True, False])
def test_a_budget_is_of_what_was_judged_before_and_after_there_was_served(misses_before, tmp_path):
    parts = {
        name: judged(PREMIUM, 96, 4 if is_bad else 0, 59)
        for name, is_bad in (("before", misses_before), ("after", not misses_before))
    }
    series = {before(name): f"{values} _x60" for name, values in parts["before"].items()}
    series |= {name: f"_x60 {values}" for name, values in parts["after"].items()}
    series[f'slackserve_slo_target_ratio{{model="m",tier="{PREMIUM}"}}'] = "0.99+0x120"
    left = f'{{model="m",tier="{PREMIUM}"}}'
    budget = {
        "expr": f"round({BUDGET_LEFT}, 0.1)",
        "eval_time": "119m",
        "exp_samples": [{"labels": left, "value": -1}],
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [budget],
    }
    promtool(tmp_path, "1m", test)
