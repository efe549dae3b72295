"""What an ingress has kept while it could not tell it counts from when it ended."""

import pytest
from monitor_reports import LATE, OK

from slo.monitor.core import ALL_OBJECTIVES, Judged
from slo.monitor.messages import IngressSeen, MonitorReport, Role
from slo.tiers import PREMIUM

NOW_S = 400.0
AGES_S = tuple(number / 2 for number in range(600))
"""Two a second, for five minutes."""


def told_late(core, *ended, ages_s):
    core.heard(MonitorReport("i", Role.INGRESS, 0, IngressSeen(ended, ages_s)), NOW_S)
    return core.state(NOW_S).tiers[PREMIUM]


def test_what_ended_in_minutes_is_no_goodput_of_seconds(core):
    tier = told_late(core, *[OK] * len(AGES_S), ages_s=AGES_S)
    assert tier.short.goodput_per_s == pytest.approx(2.0, rel=0.1)
    assert tier.long.goodput_per_s == pytest.approx(2.0, rel=0.1)


def test_misses_that_are_minutes_old_are_none_of_now(core):
    missed = [LATE] * 20
    tier = told_late(core, *missed, *[OK] * 20, ages_s=(*[200.0] * 20, *[1.0] * 20))
    assert (tier.burn.short.missed, tier.burn.long.missed) == (0, 20)


def test_what_is_older_than_the_long_window_is_judged_and_in_none(core):
    tier = told_late(core, LATE, OK, ages_s=(400.0, 1.0))
    assert (tier.long.requests, tier.burn.long.missed) == (1, 0)
    assert core.judged[Judged("m", PREMIUM, ALL_OBJECTIVES, met=False)] == 1


def test_what_comes_without_an_age_has_just_ended(core):
    assert told_late(core, *[LATE] * 3, ages_s=()).burn.short.missed == 3
