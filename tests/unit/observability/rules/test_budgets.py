"""A budget that burns is told, of the tier and model whose it is, and not on little traffic."""

import math

import pytest
from alert_rules import check, judged, promtool
from promtool import needs_promtool

from observability.burn_rates import BUDGET_LEFT, BURN_ALERTS, MIN_MISSES
from observability.files import write
from slo.tiers import DEFAULT_TIERS, PREMIUM


def minutes(window):
    return int(window[:-1]) * {"m": 1, "h": 60, "d": 1440}[window[-1]]


FIRE = [
    pytest.param(alert, tier, id=f"{alert.name}-{tier}")
    for alert in BURN_ALERTS
    for tier in DEFAULT_TIERS.names
    if alert.threshold(DEFAULT_TIERS[tier].target) < 1
]


@needs_promtool
@pytest.mark.parametrize(("alert", "tier"), FIRE)
def test_a_budget_that_burns_is_told_while_it_burns(alert, tier, tmp_path):
    step_min = minutes(alert.short) // 5
    steps = minutes(alert.long) // step_min
    threshold, every = alert.threshold(DEFAULT_TIERS[tier].target), 100_000
    interval, end_min = f"{step_min}m", steps * step_min

    def over(missed_ratio, quiet_steps=0):
        missed = round(missed_ratio * every)
        return judged(tier, every - missed, missed, steps, quiet_steps)

    reset_min = end_min + 6 * step_min
    above = over(threshold * 1.01, quiet_steps=10)
    check(tmp_path, interval, above, alert.name, {end_min: 1, reset_min: 0}, tier)
    check(tmp_path, interval, over(threshold * 0.99), alert.name, {end_min // 2: 0, end_min: 0}, tier)


@needs_promtool
@pytest.mark.parametrize(("alert", "tier"), FIRE)
def test_little_traffic_is_quiet_even_when_all_of_it_misses(alert, tier, tmp_path):
    step_min = minutes(alert.short) // 5
    steps = minutes(alert.long) // step_min
    floor = math.ceil(MIN_MISSES / alert.threshold(DEFAULT_TIERS[tier].target) - 1e-9)
    end_min = steps * step_min
    for requests, firing in ((floor * 0.95, 0), (floor * 1.05, 1)):
        series = judged(tier, 0, requests / steps, steps)
        check(tmp_path, f"{step_min}m", series, alert.name, {end_min: firing}, tier)


@needs_promtool
def test_the_top_tier_is_looked_after_before_its_budget_is_used_up(tmp_path):
    name = "SlackServeTopTierLow"
    check(tmp_path, "1m", judged(PREMIUM, 9940, 60, 80, 80), name, {80: 1, 155: 0}, PREMIUM)
    check(tmp_path, "1m", judged(PREMIUM, 9951, 49, 80), name, {80: 0}, PREMIUM)
    check(tmp_path, "1m", judged(PREMIUM, 0, 16, 80), name, {80: 0}, PREMIUM)


@needs_promtool
def test_adapters_that_miss_together_are_told_however_little_each_is_asked(tmp_path):
    alert, steps = BURN_ALERTS[0], 75
    series = {}
    for number in range(50):
        for name, values in judged(PREMIUM, 0, 0.5, steps).items():
            series[name.replace('model="m"', f'model="adapter {number}"')] = values
    check(tmp_path, "1m", series, alert.name, {steps: 1}, PREMIUM)


@needs_promtool
def test_alerts_of_a_deployment_that_names_its_models_are_for_these_alone(tmp_path):
    files = write(DEFAULT_TIERS, tmp_path, ["m-1.5", "org/b"])
    rules = [path for path in files if path.parent.name == "rules"]
    for model, firing in (("m-1.5", 1), ("org/b", 1), ("m-1x5", 0), ("other", 0)):
        series = judged(PREMIUM, 70, 30, 75, model=model)
        for alert in ("SlackServeBudgetBurn1h", "SlackServeTopTierLow"):
            check(tmp_path, "1m", series, alert, {75: firing}, PREMIUM, rules)


@needs_promtool
def test_what_is_left_of_a_budget_is_by_the_target_of_that_model(tmp_path):
    series = {}
    for model, target in (("strict", 0.99), ("lax", 0.8)):
        series |= judged(PREMIUM, 90, 10, 60, model=model)
        series[f'slackserve_slo_target_ratio{{model="{model}",tier="{PREMIUM}"}}'] = f"{target}+0x60"
    left = {"strict": -9, "lax": 0.5}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'round({BUDGET_LEFT}{{model="{model}"}}, 0.01)',
                "eval_time": "60m",
                "exp_samples": [{"labels": f'{{model="{model}",tier="{PREMIUM}"}}', "value": value}],
            }
            for model, value in left.items()
        ],
    }
    promtool(tmp_path, "1m", test)
