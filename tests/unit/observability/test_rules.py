"""Every alert fires in its case, not just below it, not on little traffic, and ends; checked by promtool."""

import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from promtool import needs_promtool

from observability.burn_rates import (
    BUDGET_LEFT,
    BURN_ALERTS,
    MIN_MISSES,
    CannotFireError,
    burn_alert,
    burn_alerts,
)
from observability.files import generated, write
from observability.promql import grown, quantile, select
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM
from telemetry.catalogue import FLEET_LOAD, REQUESTS, SLACK_AT_FIRST_TOKEN, TTFT

ROOT = Path(__file__).parents[3]
RULES = [ROOT / "observability" / "rules" / name for name in ("recording.yaml", "alerts.yaml")]
ALERTS = [
    rule
    for group in yaml.safe_load(RULES[1].read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]


def test_the_committed_files_are_those_that_are_generated():
    for path, text in generated(DEFAULT_TIERS).items():
        assert (ROOT / "observability" / path).read_text() == text, f"{path}: run `make observability`"


@needs_promtool
def test_promtool_finds_nothing_wrong():
    command = ["promtool", "check", "rules", *map(str, RULES)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_its_section_in_the_runbook():
    page = (ROOT / "docs" / "runbook.md").read_text()
    headings = re.findall(r"^### (SlackServe\w+)$", page, re.MULTILINE)
    assert sorted(headings) == sorted({rule["alert"] for rule in ALERTS})
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        assert all(f"**{part}**" in section for part in ("Means.", "Look at.", "Turn.")), section[:40]


@dataclass(frozen=True)
class Input:
    """A series of input: its level per minute, of a gauge, or its growth, of a counter."""

    series: str
    above: float
    below: float
    counts: bool = True

    def values(self, levels):
        """In promtool's notation, with an hour of each level."""
        if not self.counts:
            return " ".join(f"{level}+0x59" for level in levels)
        starts = [60 * sum(levels[:index]) for index in range(len(levels))]
        return " ".join(f"{start}+{level}x59" for start, level in zip(starts, levels, strict=True))


def gauge(series, above, below):
    return Input(series, above, below, counts=False)


CAUSES = {
    "SlackServeMonitorLost": gauge('ray_slackserve_monitor_lost{deployment="Router",model="m"}', 1, 0),
    "SlackServeApiKeysUnread": gauge('ray_slackserve_api_keys_unread{replica="i"}', 1, 0),
    "SlackServeOverload": gauge("ray_slackserve_fleet_load_ratio", 1.01, 1),
    "SlackServePrefillLost": gauge('slackserve_monitor_subscribers{model="m",role="prefill"}', 0, 1),
    "SlackServeManyStops": Input('ray_slackserve_preemptions_total{replica="r",outcome="kept"}', 20.4, 19.6),
    "SlackServeWastedWork": Input(
        'ray_slackserve_prefill_work_wasted_seconds_total{replica="r",reason="recompute"}', 3.1, 2.9
    ),
    "SlackServePreemptionUnavailable": gauge('ray_slackserve_preemption_available{replica="r"}', 0, 1),
    "SlackServeEngineEnded": Input(
        'ray_slackserve_engines_ended_total{model="m",role="prefill",cause="hung"}', 0.1, 0
    ),
    "SlackServeDecodePreemptions": Input('ray_vllm_num_preemptions_total{ReplicaId="d"}', 20.4, 19.6),
    "SlackServeStreamsDropped": Input(
        'ray_slackserve_decode_preemptions_total{replica="d",tier="background",reason="immune",by="drop"}',
        0.1,
        0,
    ),
    "SlackServeKvTransfersLost": Input('ray_slackserve_kv_transfers_total{result="failed"}', 0.51, 0.49),
    "SlackServeRouterFallbacks": Input('ray_slackserve_router_fallbacks_total{cause="error"}', 1.02, 0.98),
    "SlackServePredictionsOff": gauge(
        'slackserve_prediction_error_ratio{replica="r",statistic="mape"}', 0.51, 0.5
    ),
}
BESIDE = {
    'ray_slackserve_requests_total{tier="premium",outcome="finished"}': "0+100x180",
    'ray_slackserve_kv_usage_ratio{role="decode",replica="d"}': "0+0x180",
    'ray_slackserve_kv_usage_ratio{role="prefill",replica="p"}': "0+0x180",
    'slackserve_monitor_subscribers{model="m",role="decode"}': "1+0x180",
    'slackserve_slo_judged_total{objective="all",met="yes",tier="premium",model="m",served="m"}': "0+1x180",
}


def count_of(alert, tier=None):
    labels = f'alertname="{alert}",alertstate="firing"' + (f',tier="{tier}"' if tier else "")
    return f"count(ALERTS{{{labels}}}) or vector(0)"


def check(directory, interval, series, alert, expected, tier=None, rules=RULES):
    """Have promtool evaluate the rules over `series` and compare how many alerts fire, by minute."""
    test = {
        "interval": interval,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": count_of(alert, tier),
                "eval_time": f"{at_min:.0f}m",
                "exp_samples": [{"labels": "{}", "value": firing}],
            }
            for at_min, firing in expected.items()
        ],
    }
    promtool(directory, interval, test, rules)


def promtool(directory, interval, test, rules=RULES):
    """Have it evaluate the rules for one test."""
    groups = [group["name"] for path in rules for group in yaml.safe_load(path.read_text())["groups"]]
    content = {
        "rule_files": [str(path) for path in rules],
        "evaluation_interval": interval,
        "group_eval_order": groups,
        "tests": [test],
    }
    (directory / "test.yaml").write_text(yaml.safe_dump(content))
    command = ["promtool", "test", "rules", str(directory / "test.yaml")]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
@pytest.mark.parametrize("alert", CAUSES)
def test_a_cause_is_told_above_its_threshold_until_it_is_over(alert, tmp_path):
    cause = CAUSES[alert]
    series = {**BESIDE, cause.series: cause.values((cause.above, cause.below))}
    check(tmp_path, "1m", series, alert, {0: 0, 58: 1, 118: 0})
    series = {**BESIDE, cause.series: cause.values((cause.below, cause.below))}
    check(tmp_path, "1m", series, alert, {30: 0, 58: 0, 118: 0})


@needs_promtool
def test_work_for_no_replica_at_all_is_an_overload_and_a_start_of_both_tiers_no_loss(tmp_path):
    load = {"ray_slackserve_fleet_load_ratio": " ".join(["Inf"] * 60)}
    check(tmp_path, "1m", load, "SlackServeOverload", {58: 1})
    both = {
        'slackserve_monitor_subscribers{model="m",role="decode"}': "0+0x59",
        'slackserve_monitor_subscribers{model="m",role="prefill"}': "0+0x59",
    }
    check(tmp_path, "1m", both, "SlackServePrefillLost", {58: 0})


@needs_promtool
def test_a_cluster_that_comes_up_beside_another_has_not_lost_its_prefill(tmp_path):
    levels = {("old", "prefill"): 1, ("old", "decode"): 1, ("new", "prefill"): 0, ("new", "decode"): 0}

    def reporting():
        return {
            f'slackserve_monitor_subscribers{{model="m",role="{role}",ray_io_cluster="{of}"}}': f"{n}+0x59"
            for (of, role), n in levels.items()
        }

    check(tmp_path, "1m", reporting(), "SlackServePrefillLost", {58: 0})
    levels["new", "decode"] = 1
    check(tmp_path, "1m", reporting(), "SlackServePrefillLost", {58: 1})


LOST = {"SlackServeDecodeLost": "decode", "SlackServeIngressLost": "ingress"}


def subscribers(role, values, **labels):
    """The series of a role's processes that report."""
    of = "".join(f',{name}="{value}"' for name, value in labels.items())
    return {f'slackserve_monitor_subscribers{{model="m",role="{role}"{of}}}': values}


@needs_promtool
@pytest.mark.parametrize("alert", LOST)
@pytest.mark.parametrize("others", ["1+0x119", "1+0x59 0+0x59"])
def test_without_a_role_that_every_request_needs_somebody_is_told_until_it_is_back(alert, others, tmp_path):
    """Whether or not the others are there."""
    role = LOST[alert]
    series = {
        **subscribers("prefill", others),
        **subscribers("router", "1+0x119"),
        **subscribers("ingress" if role == "decode" else "decode", "1+0x119"),
        **subscribers(role, "2+0x29 1+0x29 0+0x29 1+0x29"),
    }
    check(tmp_path, "1m", series, alert, {59: 0, 61: 0, 63: 1, 88: 1, 92: 0, 118: 0})


@needs_promtool
@pytest.mark.parametrize("alert", LOST)
def test_a_cluster_that_comes_up_has_lost_nothing(alert, tmp_path):
    """Also beside another one, whose replicas still serve."""
    role = LOST[alert]
    series = {
        **subscribers(role, "1+0x59", ray_io_cluster="old"),
        **subscribers(role, "0+0x59", ray_io_cluster="new"),
        **subscribers("router", "1+0x59", ray_io_cluster="new"),
    }
    check(tmp_path, "1m", series, alert, dict.fromkeys(range(60), 0))


@needs_promtool
@pytest.mark.parametrize("alert", LOST)
def test_a_monitor_that_is_replaced_meanwhile_does_not_end_the_alert(alert, tmp_path):
    role = LOST[alert]
    series = {
        **subscribers(role, "1+0x29 0+0x9", instance="a"),
        **subscribers(role, "_x40 0+0x59", instance="b"),
    }
    check(tmp_path, "1m", series, alert, {29: 0, 35: 1, 43: 1, 90: 1})


@needs_promtool
@pytest.mark.parametrize("by", ["swap", "reprefill", "recompute"])
def test_memory_that_decode_takes_under_pressure_is_told_as_vllms_own_is_and_once(by, tmp_path):
    labels = f'replica="d",tier="background",reason="cost",by="{by}"'
    ours = f"ray_slackserve_decode_preemptions_total{{{labels}}}"
    for vllms in (0, 21):
        series = {**BESIDE, ours: "0+21x59", 'ray_vllm_num_preemptions_total{ReplicaId="d"}': f"0+{vllms}x59"}
        check(tmp_path, "1m", series, "SlackServeDecodePreemptions", {58: 1})
    check(tmp_path, "1m", {**BESIDE, ours: "0+19x59"}, "SlackServeDecodePreemptions", {58: 0})


@needs_promtool
def test_an_absent_indicator_is_told_and_one_that_comes_back_ends_it(tmp_path):
    series = {'slackserve_slo_judged_total{model="m",served="m",tier="premium"}': "0+1x9 _x20 5+1x30"}
    check(tmp_path, "1m", series, "SlackServeSliAbsent", {9: 0, 12: 0, 28: 1, 31: 0, 40: 0})


@needs_promtool
def test_an_indicator_of_one_model_that_is_absent_is_told_though_another_has_one(tmp_path):
    other = {
        'slackserve_slo_judged_total{model="b",served="b",tier="premium"}': "0+1x180",
        'ray_slackserve_monitor_lost{model="b",deployment="Router"}': "0+0x180",
    }
    check(tmp_path, "1m", other, "SlackServeSliAbsent", {30: 0, 90: 0, 170: 0})
    gone = {'slackserve_slo_judged_total{model="adapter",served="a",tier="premium"}': "0+1x60 _x120"}
    check(tmp_path, "1m", {**other, **gone}, "SlackServeSliAbsent", {58: 0, 75: 1, 115: 1, 170: 0})
    known = {
        'ray_slackserve_monitor_lost{model="a",deployment="Router"}': "0+0x180",
        'ray_slackserve_monitor_lost{model="a",deployment="Prefill"}': "0+0x180",
    }
    check(tmp_path, "1m", {**other, **known}, "SlackServeSliAbsent", {4: 0, 30: 1, 170: 1})
    check(tmp_path, "1m", {**other, **known, **gone}, "SlackServeSliAbsent", {58: 0, 75: 1, 170: 1})


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "series", "first"),
    [
        (
            "SlackServeEngineEnded",
            'ray_slackserve_engines_ended_total{model="m",role="decode",cause="failed"}',
            1,
        ),
        ("SlackServeKvTransfersLost", 'ray_slackserve_kv_transfers_total{result="expired"}', 6),
    ],
)
def test_what_a_counter_begins_with_counts_also_when_its_process_ends_at_once(alert, series, first, tmp_path):
    up = {"up": "1x60"}
    check(tmp_path, "1m", {**up, series: f"_x20 {first}x30"}, alert, {19: 0, 21: 1, 29: 1, 45: 0})
    check(tmp_path, "1m", {**up, series: f"_x20 {first}x1"}, alert, {22: 1, 24: 1, 45: 0})


@needs_promtool
@pytest.mark.parametrize("away_min", [0, 30, 60, 68, 70, 72, 75, 79, 81, 300])
def test_a_prometheus_that_was_away_makes_nothing_of_what_a_counter_had_before(away_min, tmp_path):
    """Nor does a new one: the first part is its start beside a deployment that has run for long."""
    series = {
        'up{job="ray"}': f"1x30 _x{away_min} 1x60",
        'ray_slackserve_kv_transfers_total{result="expired"}': f"_ 100x29 _ _x{away_min} 100x59",
    }
    check(tmp_path, "1m", series, "SlackServeKvTransfersLost", dict.fromkeys(range(90 + away_min), 0))


@needs_promtool
@pytest.mark.parametrize("away_min", [30, 60, 68, 70, 72, 75, 79, 81, 300])
def test_a_node_that_could_not_be_reached_makes_nothing_of_what_a_counter_had_before(away_min, tmp_path):
    node = 'instance="n1",job="ray"'
    series = {
        f"up{{{node}}}": f"1x30 0x{away_min} 1x60",
        'up{instance="n2",job="ray"}': f"1x{95 + away_min}",
        f'ray_slackserve_kv_transfers_total{{result="expired",{node}}}': f"100x30 _x{away_min} 100x60",
    }
    check(tmp_path, "1m", series, "SlackServeKvTransfersLost", dict.fromkeys(range(28, 90 + away_min), 0))


@needs_promtool
def test_what_the_counter_of_a_new_node_begins_with_counts(tmp_path):
    node = 'instance="n2",job="ray"'
    series = {
        'up{instance="n1",job="ray"}': "1x60",
        f"up{{{node}}}": "_x20 1x40",
        f'ray_slackserve_kv_transfers_total{{result="expired",{node}}}': "_x22 6x38",
    }
    check(tmp_path, "1m", series, "SlackServeKvTransfersLost", {21: 0, 23: 1, 29: 1, 45: 0})


@needs_promtool
@pytest.mark.parametrize("gap", ["stale", "_x3", "stale _x30"])
def test_a_scrape_that_failed_makes_nothing_of_what_a_counter_had_before(gap, tmp_path):
    series = {
        'up{job="ray"}': "1x130",
        'ray_slackserve_kv_transfers_total{result="expired"}': f"100x30 {gap} 100x60",
        'ray_slackserve_requests_total{tier="premium"}': "0+1x120",
        'ray_slackserve_router_fallbacks_total{cause="error"}': f"100x30 {gap} 100x60",
    }
    for alert in ("SlackServeKvTransfersLost", "SlackServeRouterFallbacks"):
        check(tmp_path, "1m", series, alert, dict.fromkeys(range(28, 90), 0))


@needs_promtool
@pytest.mark.parametrize(("lost", "firing"), [(0.9, 0), (1.1, 1)])
def test_kv_transfers_that_are_lost_are_told_when_they_are_many_of_all(lost, firing, tmp_path):
    series = {
        'ray_slackserve_kv_transfers_total{result="done"}': "0+99x60",
        'ray_slackserve_kv_transfers_total{result="failed"}': f"0+{lost}x60",
    }
    check(tmp_path, "1m", series, "SlackServeKvTransfersLost", {58: firing})


@needs_promtool
def test_a_few_requests_without_the_router_are_not_told(tmp_path):
    series = {
        'ray_slackserve_requests_total{tier="premium"}': "0+0.4x60",
        'ray_slackserve_router_fallbacks_total{cause="paused"}': "0+0.4x60",
    }
    check(tmp_path, "1m", series, "SlackServeRouterFallbacks", {30: 0, 58: 0})


def minutes(window):
    return int(window[:-1]) * {"m": 1, "h": 60, "d": 1440}[window[-1]]


def judged(tier, met, missed, steps, quiet_steps=0, model="m"):
    """The two series of a tier that judges so many requests in each step, and then none that misses."""
    labels = f'model="{model}",served="{model}",tier="{tier}",objective="all"'
    name = f'slackserve_slo_judged_total{{{labels},met="%s"}}'
    return {
        name % "yes": f"0+{met}x{steps + quiet_steps}",
        name % "no": f"0+{missed}x{steps} {missed * steps}+0x{quiet_steps}",
    }


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


def test_every_alert_is_tried():
    tried = {*CAUSES, *LOST, "SlackServeSliAbsent", "SlackServeTopTierLow", *(it.name for it in BURN_ALERTS)}
    assert {rule["alert"] for rule in ALERTS} == tried


def test_an_alert_that_cannot_fire_is_refused_and_the_file_says_so():
    with pytest.raises(CannotFireError, match="144%"):
        burn_alert(BURN_ALERTS[0], BACKGROUND, 0.9)
    group, left_out = burn_alerts(DEFAULT_TIERS)
    assert len(left_out) == 1
    assert ("SlackServeBudgetBurn1h", BACKGROUND) not in {(it.alert, it.tier) for it in group.rules}
    assert left_out[0] in RULES[1].read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: select(FLEET_LOAD, tier="premium"),
        lambda: grown(REQUESTS, "5m", "tenant"),
        lambda: quantile(0.9, REQUESTS, "5m"),
        lambda: quantile(0.9, SLACK_AT_FIRST_TOKEN, "5m", "tier"),
    ],
)
def test_an_expression_that_no_metric_can_answer_is_refused(wrong):
    with pytest.raises(ValueError, match="slackserve_"):
        wrong()
    assert quantile(0.9, TTFT, "5m", "tier").startswith("histogram_quantile(0.9, sum by (tier, le)")
