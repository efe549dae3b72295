"""Every alert fires in its case, not just below it, and ends."""

from dataclasses import dataclass

import pytest
from alert_rules import ALERTS, check
from promtool import needs_promtool

from deployments.names import ROUTER_NAME
from observability.burn_rates import BURN_ALERTS


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


@needs_promtool
@pytest.mark.parametrize(("prefill", "decode", "alerts"), [(1, 1, 0), (0, 1, 1), (0, 0, 0)])
def test_a_monitor_that_nobody_reports_to_any_more_does_not_say_that_prefill_is_lost(
    prefill, decode, alerts, tmp_path
):
    """As after an upgrade: that of the old code is on another node for some minutes."""
    series = {
        **subscribers("prefill", "1+0x9 0+0x49", instance="old"),
        **subscribers("decode", "1+0x9 0+0x49", instance="old"),
        **subscribers("prefill", f"{prefill}+0x59", instance="new"),
        **subscribers("decode", f"{decode}+0x59", instance="new"),
    }
    check(tmp_path, "1m", series, "SlackServePrefillLost", {15: alerts, 58: alerts})


@needs_promtool
@pytest.mark.parametrize(("used", "alerts"), [(1, 0), (0, 1)])
def test_prefill_that_reports_to_a_monitor_of_other_code_is_not_lost(used, alerts, tmp_path):
    series = {
        **subscribers("prefill", "1+0x9 0+0x49"),
        **subscribers("decode", "1+0x59"),
        'slackserve_monitor_replicas{model="m",role="prefill"}': f"1+0x9 {used}+0x49",
        'slackserve_monitor_replicas{model="other",role="prefill"}': "1+0x59",
        'slackserve_monitor_replicas{model="m",role="decode"}': "1+0x59",
    }
    check(tmp_path, "1m", series, "SlackServePrefillLost", {9: 0, 20: alerts, 58: alerts})


@needs_promtool
@pytest.mark.parametrize(("router", "alerts"), [("0+0x59", 0), ("1+0x59", 1), ("0+0x9 _x50", 1)])
@pytest.mark.parametrize("alert", ["SlackServePrefillLost", "SlackServeDecodeLost"])
def test_a_monitor_that_the_router_has_left_for_another_does_not_know_who_is_lost(
    alert, router, alerts, tmp_path
):
    """As in an upgrade that waits for its ingress: until that is up, the monitor of the old code exports."""
    decode = "1+0x59" if alert == "SlackServePrefillLost" else "1+0x9 0+0x49"
    series = {
        **subscribers("ingress", "1+0x59"),
        **subscribers("router", "1+0x9 0+0x49"),
        **subscribers("prefill", "1+0x9 0+0x49"),
        **subscribers("decode", decode),
        'slackserve_monitor_replicas{model="m",role="prefill"}': "1+0x9 0+0x49",
        'slackserve_monitor_replicas{model="m",role="decode"}': decode,
        f'ray_slackserve_monitor_lost{{model="m",deployment="{ROUTER_NAME}"}}': router,
        'ray_slackserve_monitor_lost{model="m",deployment="Ingress"}': "0+0x59",
        f'ray_slackserve_monitor_lost{{model="other",deployment="{ROUTER_NAME}"}}': "0+0x59",
    }
    check(tmp_path, "1m", series, alert, {9: 0, 20: alerts, 58: alerts})


@needs_promtool
@pytest.mark.parametrize("alert", ["SlackServePrefillLost", "SlackServeDecodeLost"])
def test_a_monitor_to_which_the_router_reports_knows_who_is_lost(alert, tmp_path):
    series = {
        **subscribers("router", "1+0x59"),
        **subscribers("prefill", "1+0x9 0+0x49"),
        **subscribers("decode", "1+0x59" if alert == "SlackServePrefillLost" else "1+0x9 0+0x49"),
        f'ray_slackserve_monitor_lost{{model="m",deployment="{ROUTER_NAME}"}}': "0+0x59",
    }
    check(tmp_path, "1m", series, alert, {9: 0, 20: 1, 58: 1})


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
@pytest.mark.parametrize(("routers", "firing"), [("1+0x59", 1), ("1+0x9 0+0x49", 0)])
def test_a_cluster_that_is_drained_beside_its_successor_has_lost_nothing(alert, routers, firing, tmp_path):
    """One that keeps its router has."""
    role = LOST[alert]
    series = {
        **subscribers(role, "1+0x9 0+0x49", ray_io_cluster="old"),
        **subscribers("router", routers, ray_io_cluster="old"),
        **subscribers(role, "1+0x59", ray_io_cluster="new"),
        **subscribers("router", "1+0x59", ray_io_cluster="new"),
    }
    check(tmp_path, "1m", series, alert, {9: 0, 20: firing, 59: firing})


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
@pytest.mark.parametrize(
    ("used", "alerts"),
    [
        ("2+0x9 _x2 2+0x46", {15: 0, 58: 0}),
        ("2+0x9 _x2 2+0x17 0+0x28", {28: 0, 35: 1, 58: 1}),
        ("2+0x9 0+0x49", {15: 1, 58: 1}),
    ],
    ids=["are used", "are lost later", "are lost at once"],
)
def test_decode_that_reports_to_a_monitor_of_other_code_is_not_lost_while_the_router_uses_it(
    used, alerts, tmp_path
):
    """As during an upgrade, until the first decode replica of the new code is up."""
    series = {
        **subscribers("decode", "2+0x9 0+0x49"),
        **subscribers("ingress", "1+0x59"),
        **subscribers("router", "1+0x9 0 1+0x48"),
        'slackserve_monitor_replicas{model="m",role="decode"}': used,
        'slackserve_monitor_replicas{model="m",role="prefill"}': "1+0x59",
        'slackserve_monitor_replicas{model="other",role="decode"}': "1+0x59",
        'slackserve_monitor_replicas{model="m",role="decode",ray_io_cluster="other"}': "1+0x59",
    }
    check(tmp_path, "1m", series, "SlackServeDecodeLost", {9: 0, **alerts})


@needs_promtool
def test_a_monitor_that_is_restarted_while_decode_is_lost_does_not_end_the_alert(tmp_path):
    series = {
        **subscribers("decode", "1+0x9 0+0x9 _ 0+0x38"),
        'slackserve_monitor_replicas{model="m",role="decode"}': "1+0x9 0+0x9 _ 0+0x38",
    }
    check(tmp_path, "1m", series, "SlackServeDecodeLost", {9: 0, 15: 1, 20: 1, 22: 1, 58: 1})


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


def test_every_alert_is_tried():
    tried = {*CAUSES, *LOST, "SlackServeSliAbsent", "SlackServeTopTierLow", *(it.name for it in BURN_ALERTS)}
    assert {rule["alert"] for rule in ALERTS} == tried
