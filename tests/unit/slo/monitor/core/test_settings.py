"""Which settings hold while ingresses bring different ones."""

from dataclasses import replace

from monitor_reports import LATE, OK, SETTINGS, ingress

from slo.monitor.core import FORGET_AFTER_S
from slo.tiers import DEFAULT_TIERS, PREMIUM


def test_other_settings_hold_from_the_report_on_that_brings_them(core):
    core.heard(ingress(LATE), 0.0)
    stricter = {PREMIUM: replace(DEFAULT_TIERS[PREMIUM], target=0.999)}
    strict = replace(SETTINGS, tiers=DEFAULT_TIERS.revised(stricter))
    core.heard(ingress(settings=strict), 0.0)
    assert core.state(1.0).tiers[PREMIUM].target == 0.999
    assert core.state(1.0).tiers[PREMIUM].long.judged == 1
    core.heard(ingress(settings=replace(strict, window_s=60.0)), 0.0)
    assert core.state(1.0).tiers[PREMIUM].long.judged == 0


def test_those_that_drain_do_not_take_the_settings_back(core):
    old, new = replace(SETTINGS, window_s=300.0), replace(SETTINGS, window_s=600.0)
    core.heard(ingress(reporter="a", settings=old), 0.0)
    core.heard(ingress(reporter="b", settings=new), 0.0)
    core.heard(ingress(*[OK] * 5, reporter="a", settings=old), 1.0)
    core.heard(ingress(reporter="b", settings=new), 1.0)
    assert core.settings == new
    assert core.state(1.0).tiers[PREMIUM].long.judged == 5
    core.heard(ingress(reporter="b", settings=replace(new, steers=False)), 2.0)
    assert not core.settings.steers, "who taught them may change them"


def test_settings_of_others_hold_once_their_teacher_is_forgotten(core):
    old, new = replace(SETTINGS, window_s=300.0), replace(SETTINGS, window_s=600.0)
    core.heard(ingress(reporter="a", settings=old), 0.0)
    core.heard(ingress(reporter="b", settings=new), 0.0)
    core.heard(ingress(reporter="a", settings=old), FORGET_AFTER_S)
    core.look(FORGET_AFTER_S)
    assert core.settings == new
    core.look(FORGET_AFTER_S + 0.1)
    core.heard(ingress(reporter="a", settings=old), FORGET_AFTER_S + 0.2)
    assert core.settings == old
