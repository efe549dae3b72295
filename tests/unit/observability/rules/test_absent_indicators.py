"""An indicator that is absent is told, of each model."""

from alert_rules import check
from promtool import needs_promtool


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
