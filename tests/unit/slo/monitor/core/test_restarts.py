"""A monitor that is started again goes on with the policy that is followed."""

from hypothesis import given, settings
from hypothesis import strategies as st
from monitor_reports import LATE, SETTINGS, ingress, router

from slo.monitor.core import SETTLE_S, MonitorCore
from slo.monitor.messages import MonitorAnswer
from slo.monitor.policy import UNSTEERED, ClusterPolicy, newer_of
from slo.tiers import BACKGROUND

SHED = ClusterPolicy(17, {BACKGROUND: 0.5})


def test_a_new_monitor_asks_for_the_policy_that_is_followed_and_goes_on_with_it(core):
    answer = core.heard(ingress(follows=17), 0.0)
    assert answer.wanted
    assert answer.policy is None
    behind = core.heard(ingress(reporter="j", follows=15), 0.1)
    assert behind == MonitorAnswer(), "it cannot tell what it does not know"
    assert not core.heard(ingress(follows=17, policy=SHED), 0.5).wanted
    assert core.heard(ingress(reporter="j", follows=15), 0.6).policy == SHED
    core.look(SETTLE_S)
    assert core.policy.version == 18
    assert core.policy.shed_level(BACKGROUND) == 0.5, "nothing is let in on the strength of no news"


def test_a_policy_that_nobody_can_tell_any_more_is_replaced_under_a_higher_number(core):
    assert core.heard(ingress(follows=17), 0.0).wanted
    core.look(SETTLE_S - 0.1)
    assert core.policy.version == 17
    core.look(SETTLE_S)
    assert core.policy.version > 17
    assert core.heard(ingress(reporter="j", follows=17), SETTLE_S).policy is core.policy


def test_a_new_monitor_that_issued_the_number_that_somebody_follows_already_counts_on(core):
    core.look(SETTLE_S)
    assert core.policy.version == 1
    answer = core.heard(ingress(follows=1, reporter="of the old one"), SETTLE_S + 1)
    assert answer.policy.version == 2


class Reporter:
    """Follows as the clients do."""

    def __init__(self, name):
        self.name, self.policy, self.wanted = name, UNSTEERED, False
        self.versions = [0]

    def report(self, core, now_s):
        report = ingress(
            reporter=self.name, follows=self.policy.version, policy=self.policy if self.wanted else None
        )
        answer = core.heard(report, now_s)
        self.wanted = answer.wanted
        self.policy = newer_of(self.policy, answer.policy)
        self.versions.append(self.policy.version)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc*+-"), st.floats(0.1, 20)), max_size=80))
def test_through_any_restarts_versions_grow_and_one_version_has_one_content(events):
    """Letters report; `*` kills the monitor; `+` and `-` are load and rest."""
    now_s, core = 0.0, MonitorCore(SETTINGS, 0.0)
    reporters = {name: Reporter(name) for name in "abc"}
    for what, passed_s in events:
        now_s += passed_s
        match what:
            case "*":
                core = MonitorCore(SETTINGS, now_s)
                for reporter in reporters.values():  # all that live report within the time to settle
                    reporter.report(core, now_s)
            case "+":
                core.heard(router(), now_s)
                core.heard(ingress(*[LATE] * 20, reporter="load"), now_s)
            case "-":
                core.look(now_s)
            case name:
                reporters[name].report(core, now_s)
        for reporter in reporters.values():
            assert reporter.versions == sorted(reporter.versions)
    for _ in range(3):
        now_s += 0.5
        for reporter in reporters.values():
            reporter.report(core, now_s)
    assert [reporter.policy for reporter in reporters.values()] == [core.policy] * 3
