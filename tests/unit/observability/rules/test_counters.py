"""What a counter begins with counts, and what one had before a gap does not."""

import pytest
from alert_rules import check
from promtool import needs_promtool


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
@pytest.mark.parametrize(
    ("alert", "series", "values"),
    [
        ("SlackServeManyStops", 'ray_slackserve_preemptions_total{replica="r"}', "200+25x30"),
        ("SlackServeWastedWork", 'ray_slackserve_prefill_work_wasted_seconds_total{replica="r"}', "60x30"),
        ("SlackServeDecodePreemptions", 'ray_vllm_num_preemptions_total{ReplicaId="d"}', "200+25x30"),
        (
            "SlackServeDecodePreemptions",
            'ray_slackserve_decode_preemptions_total{replica="d",by="swap"}',
            "200+25x30",
        ),
    ],
)
def test_what_the_counter_of_a_new_replica_begins_with_counts_for_its_pace(alert, series, values, tmp_path):
    others = {"up": "1x60", 'ray_slackserve_kv_usage_ratio{role="decode",replica="d"}': "0x60"}
    check(tmp_path, "1m", {**others, series: f"_x20 {values}"}, alert, {24: 0, 26: 1, 28: 1})


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
