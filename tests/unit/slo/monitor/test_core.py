"""What the monitor answers to reports, how it revises the policy, and how its successor goes on."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_tiers import FILE, FOUR, IMAGE, SEARCH, TEXT

from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand
from slo.monitor.core import ALL_OBJECTIVES, FORGET_AFTER_S, SETTLE_S, Judged, MonitorCore
from slo.monitor.directives import DirectiveReason, ReplicaSeen, StepSeen, WaiterSeen
from slo.monitor.messages import (
    DecodeSeen,
    IngressSeen,
    MonitorAnswer,
    MonitorReport,
    PrefillSeen,
    Role,
    RouterSeen,
)
from slo.monitor.policy import UNSTEERED, ClusterPolicy, newer_of
from slo.monitor.settings import MonitorSettings
from slo.monitor.shedding import SteerReason
from slo.outcomes import Outcome, RequestEnded
from slo.predict.prediction_error import MIN_SAMPLES, PassMeasured
from slo.preemption.types import KeepReason, PreemptionPolicy
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, ObjectiveName

R = ReplicaId("r")
OK = RequestEnded("m", PREMIUM, "acme", Outcome.FINISHED, 1.0, ttft_s=0.1, ttft_budget_s=0.2)
LATE = replace(OK, ttft_s=0.3)
SHED = ClusterPolicy(17, {BACKGROUND: 0.5})
SETTINGS = MonitorSettings(margin=2.0, preemption=PreemptionPolicy.RESCUE)


def ingress(*ended, follows=0, reporter="i", **more):
    return MonitorReport(reporter, Role.INGRESS, follows, IngressSeen(ended), **more)


def prefill(*measured, step=None, waiting=(), follows=0, replica=R, correction=1.0):
    seen = PrefillSeen(ReplicaSeen(replica, step, tuple(waiting)), measured, correction=correction)
    return MonitorReport(replica, Role.PREFILL, follows, seen)


def router(work=1.8, *, capacity=2.0):
    """By default its fleet is busy."""
    demand = FleetDemand(PrefillDemand(work, 0.0, capacity=capacity), DecodeDemand(0.2, 3, replicas=2))
    return MonitorReport("router", Role.ROUTER, 0, RouterSeen({}, {}, demand))


def slow(times, *, passes=1, corrected=1.0):
    return [PassMeasured(0.1, 0.1 * corrected, 0.1 * times)] * passes


@pytest.fixture
def core():
    return MonitorCore(SETTINGS, 0.0)


def test_the_answer_to_a_report_is_the_policy_and_nothing_once_it_is_followed(core):
    assert core.heard(ingress(), 0.0).policy is None
    core.look(SETTLE_S)
    answer = core.heard(ingress(follows=0), SETTLE_S)
    assert answer.policy is core.policy
    assert core.policy.version == 1
    assert core.heard(ingress(follows=1), SETTLE_S).policy is None


def test_the_configured_preemption_goes_with_the_policy(core):
    core.look(SETTLE_S)
    assert (core.policy.preemption, core.policy.margin) == (PreemptionPolicy.RESCUE, 2.0)


def test_premium_that_misses_has_background_shed_and_is_relieved_later(core):
    core.heard(router(), 100.0)
    core.heard(ingress(*[OK] * 50, *[LATE] * 10), 100.0)
    assert core.look(101.0) is SteerReason.TOP_TIER_AT_RISK
    assert core.policy.shed_level(BACKGROUND) == 0.25
    assert core.policy.reserved == 0.15
    assert core.look(102.0) is SteerReason.TOO_SOON
    for second in range(110, 400):
        core.heard(ingress(*[OK] * 5), float(second))
        core.look(float(second))
    assert core.policy.shed_level(BACKGROUND) == 0.0
    assert core.policy.reserved == 0.0


@pytest.mark.parametrize(
    "said", [router(0.02), router(0.02, capacity=0.0), None], ids=["idle", "none", "no word"]
)
def test_misses_that_are_not_for_load_shed_nobody(core, said):
    """One client that promises itself a first token in a millisecond, every eight seconds."""
    hopeless = replace(OK, ttft_s=0.1, ttft_budget_s=0.001)
    for second in range(600):
        if said is not None:
            core.heard(said, float(second))
        if second % 8 == 0:
            core.heard(ingress(hopeless), float(second))
        core.look(float(second))
    assert core.state(600.0).tiers[PREMIUM].burn.long.rate > 2, "operators see them"
    assert not any(core.policy.shed.values())
    assert core.policy.reserved == 0.0


def test_a_loaded_fleet_is_not_steered_by_what_nothing_would_keep(core):
    hopeless = replace(LATE, ttft_budget_s=0.001, unattainable=(ObjectiveName.TTFT,))
    for second in range(100, 160):
        core.heard(router(), float(second))
        core.heard(ingress(OK, hopeless, hopeless), float(second))
        assert core.look(float(second)) is SteerReason.NOTHING_TO_DO
    state = core.state(160.0).tiers[PREMIUM]
    assert (state.long.ratio, state.at_risk) == (pytest.approx(1 / 3), False)
    assert state.burn.long.rate > 50, "people see all"
    assert core.judgements()[Judged("m", PREMIUM, ALL_OBJECTIVES, met=False)] == 120
    assert not core.demand(160.0).prefill.at_risk
    core.heard(ingress(*[LATE] * 10), 160.0)
    assert core.look(160.0) is SteerReason.TOP_TIER_AT_RISK
    assert core.demand(160.0).prefill.at_risk


def test_a_monitor_that_does_not_steer_sheds_nothing():
    core = MonitorCore(replace(SETTINGS, steers=False), 0.0)
    core.heard(router(), 100.0)
    core.heard(ingress(*[LATE] * 50), 100.0)
    core.look(101.0)
    assert not any(core.policy.shed.values())
    assert core.state(101.0).tiers[PREMIUM].at_risk


def test_a_monitor_that_is_told_to_steer_no_more_takes_back_what_it_shed(core):
    core.heard(router(), 100.0)
    core.heard(ingress(*[LATE] * 50), 100.0)
    core.look(101.0)
    version = core.policy.version
    assert core.policy.shed[BACKGROUND] > 0
    assert core.policy.reserved > 0
    core.heard(ingress(settings=replace(SETTINGS, steers=False)), 102.0)
    assert core.look(103.0) is SteerReason.NOTHING_TO_DO
    assert (dict(core.policy.shed), core.policy.reserved) == ({}, 0.0)
    assert core.policy.version == version + 1
    core.look(104.0)
    assert core.policy.version == version + 1


def test_a_monitor_that_is_told_to_correct_no_more_takes_back_its_corrections(core):
    erratic = [measured for times in (1.0, 1.0, 1.0, 3.5) for measured in slow(times, passes=12)]
    core.heard(prefill(*erratic), SETTLE_S)
    core.heard(prefill(*slow(3.0, passes=20), replica=ReplicaId("slow")), SETTLE_S)
    core.look(SETTLE_S)
    version = core.policy.version
    assert core.state(SETTLE_S).corrections[ReplicaId("slow")] > 1
    assert core.policy.margin > SETTINGS.margin
    core.heard(ingress(settings=replace(SETTINGS, corrects=False)), SETTLE_S)
    for second in (1, 2):
        core.look(SETTLE_S + second)
        assert core.policy == ClusterPolicy(version + 1), "what each replica has configured holds"
        assert set(core.state(SETTLE_S).corrections.values()) == {1.0}


def test_a_replica_that_is_slower_than_it_says_is_corrected(core):
    core.heard(prefill(*slow(3.0, passes=10)), SETTLE_S)
    core.look(SETTLE_S)
    version = core.policy.version
    told = core.heard(prefill(), SETTLE_S).correction
    assert told == pytest.approx(3.0, rel=0.03)
    core.heard(prefill(*slow(3.02, passes=10, corrected=3.0), correction=told), SETTLE_S)
    core.look(SETTLE_S + 1)
    assert core.heard(prefill(correction=told), SETTLE_S + 1).correction is None, "one per cent is nothing"
    assert core.errors()[R].samples == 20
    core.heard(prefill(*slow(2.0, passes=64), correction=told), SETTLE_S + 1)
    core.look(SETTLE_S + 2)
    assert core.heard(prefill(correction=told), SETTLE_S + 2).correction == pytest.approx(2.0, rel=0.03)
    assert core.policy.version == version, "it is nobody else's"


def test_of_many_replicas_each_hears_its_own_correction_and_nobody_a_new_policy(core):
    """A hundred replicas, each with passes a tenth longer or shorter than a mean of its own."""
    drawn = random.Random(1)
    means = {ReplicaId(f"r{n}"): 1 + n / 100 for n in range(100)}
    follows = dict.fromkeys(means, 1.0)
    for second in range(int(SETTLE_S), 300):
        for replica, mean in means.items():
            measured = slow(mean * drawn.gauss(1, 0.1), corrected=follows[replica])
            report = prefill(*measured, replica=replica, correction=follows[replica], follows=1)
            if (correction := core.heard(report, float(second)).correction) is not None:
                follows[replica] = correction
        core.look(float(second))
    assert core.policy.version <= 3
    assert all(0.95 * mean < follows[replica] < 1.2 * mean for replica, mean in means.items())


def test_a_monitor_that_is_restarted_leaves_each_replica_its_correction(core):
    assert core.heard(prefill(correction=2.0), 0.0).correction is None
    core.look(SETTLE_S)
    assert core.heard(prefill(correction=2.0), SETTLE_S).correction is None
    core.heard(prefill(*slow(3.0, passes=10), correction=2.0), SETTLE_S + 1)
    core.look(SETTLE_S + 2)
    assert core.heard(prefill(correction=2.0), SETTLE_S + 3).correction == pytest.approx(3.0, rel=0.03)


def test_how_far_predictions_are_off_is_said_of_enough_passes_and_of_late(core):
    core.heard(prefill(*slow(3.0, passes=MIN_SAMPLES - 1)), SETTLE_S)
    assert core.errors() == {R: None}
    core.heard(prefill(*slow(3.0)), SETTLE_S + 100)
    assert core.errors()[R].mape == pytest.approx(2 / 3)
    for second in range(100, 410, 5):
        core.heard(prefill(), SETTLE_S + second)
        core.look(SETTLE_S + second)
        assert (core.errors()[R] is None) == (second > 400)
    assert core.state(SETTLE_S + 410).corrections[R] == pytest.approx(3.0, rel=0.03), "what was learned stays"
    core.heard(prefill(*slow(3.0, passes=MIN_SAMPLES, corrected=3.0)), SETTLE_S + 410)
    core.look(SETTLE_S + 411)
    assert core.errors()[R].mape == pytest.approx(0.0)


def test_the_margin_covers_predictions_that_stay_too_short():
    core = MonitorCore(SETTINGS, 0.0)
    erratic = [measured for times in (1.0, 1.0, 1.0, 3.5) for measured in slow(times, passes=12)]
    core.heard(prefill(*erratic), SETTLE_S)
    core.look(SETTLE_S)
    assert core.policy.margin == 3.5
    core.heard(prefill(*slow(1.0, passes=64)), SETTLE_S + 1)
    core.look(SETTLE_S + 2)
    assert core.policy.margin == SETTINGS.margin


def test_a_replica_that_is_gone_leaves_nothing_behind(core):
    core.heard(prefill(*slow(3.0, passes=20)), SETTLE_S)
    core.look(SETTLE_S)
    core.look(SETTLE_S + FORGET_AFTER_S + 1)
    assert core.state(SETTLE_S).corrections == {}
    assert not core.subscribers
    assert core.heard_s == SETTLE_S


def test_a_directive_goes_to_its_replica_once_for_each_step(core):
    step = StepSeen(7, (BACKGROUND,), 2.0, 0.1, KeepReason.WAITERS_IN_TIME)
    urgent = WaiterSeen(JobId("urgent"), PREMIUM, 1.0)
    (directive,) = core.heard(prefill(step=step, waiting=[urgent]), 0.0).directives
    assert (directive.replica_id, directive.step_id, directive.beneficiary) == (R, 7, "urgent")
    assert core.heard(prefill(step=step, waiting=[urgent]), 0.5).directives == ()
    again = core.heard(prefill(step=replace(step, step_id=8), waiting=[urgent]), 1.0).directives
    assert [it.step_id for it in again] == [8]
    assert core.directed[DirectiveReason.OUT_OF_TIME] == 2
    still = MonitorCore(replace(SETTINGS, directs=False), 0.0)
    assert still.heard(prefill(step=step, waiting=[urgent]), 0.0).directives == ()


def test_a_tier_that_burns_across_the_cluster_is_heeded_on_every_replica(core):
    step = StepSeen(7, (STANDARD,), 2.0, 0.1, KeepReason.WOULD_HARM)
    urgent = WaiterSeen(JobId("urgent"), PREMIUM, 1.0)
    assert core.heard(prefill(step=step, waiting=[urgent]), 99.0).directives == ()
    core.heard(ingress(*[LATE] * 20), 100.0)
    core.look(101.0)
    (directive,) = core.heard(prefill(step=step, waiting=[urgent]), 102.0).directives
    assert directive.reason is DirectiveReason.TIER_AT_RISK


def test_the_state_tells_it_all(core):
    core.heard(ingress(*[OK] * 30, *[LATE] * 10, dropped=2), 100.0)
    core.heard(prefill(*slow(1.5)), 100.0)
    core.heard(MonitorReport("d", Role.DECODE, 9, DecodeSeen(ReplicaId("d"), 0.5, 3)), 100.0)
    placed = {(PREMIUM, "only_replica"): 3}
    core.heard(MonitorReport("router", Role.ROUTER, 9, RouterSeen(placed, {})), 100.0)
    core.heard(MonitorReport("router", Role.ROUTER, 9, RouterSeen(placed, {})), 100.5)
    state = core.state(101.0)
    premium = state.tiers[PREMIUM]
    assert premium.long.ratio == 0.75
    assert premium.burn.short.rate == pytest.approx(25.0)
    assert premium.at_risk
    assert state.tiers[STANDARD].long.ratio is None
    assert [series.tenant for series in core.series(101.0)] == ["acme"]
    assert state.error.mape == pytest.approx(1 / 3)
    assert state.subscribers == dict.fromkeys(Role, 1)
    assert state.behind == 2
    assert core.placed[PREMIUM, "only_replica"] == 6
    assert core.dropped == 2


def test_what_is_told_again_is_not_counted_again_and_the_present_is_taken(core):
    demand = FleetDemand(PrefillDemand(1.5, 2.0), DecodeDemand(0.2, 3, replicas=2))
    for waiting in (demand, replace(demand, decode=DecodeDemand(0.9, 3, replicas=2))):
        core.heard(ingress(LATE, LATE, batch=7), 0.0)
        core.heard(replace(prefill(*slow(1.5)), batch=3), 0.0)
        decided = RouterSeen({(PREMIUM, "only_replica"): 3}, {(PREMIUM, "backlog"): 2}, waiting)
        core.heard(MonitorReport("router", Role.ROUTER, 0, decided, batch=5), 0.0)
    assert core.judged[LATE.model, PREMIUM, ALL_OBJECTIVES, False] == 2
    assert core.placed.total() == 3
    assert core.refused.total() == 2
    assert core.demand(0.0).decode.memory == 0.9
    assert core.state(0.0).error.samples == 1
    core.heard(ingress(LATE, batch=8), 1.0)
    core.heard(ingress(LATE, reporter="another", batch=8), 1.0)
    assert core.judged[LATE.model, PREMIUM, ALL_OBJECTIVES, False] == 4


def test_what_is_told_again_after_minutes_counts_once(core):
    """As by a process behind a network that was cut: it was heard, and did not hear the answer."""
    core.heard(ingress(LATE, batch=7), 0.0)
    core.look(120.0)
    assert core.subscribers == {}
    core.heard(ingress(LATE, batch=7), 121.0)
    assert core.judged[LATE.model, PREMIUM, ALL_OBJECTIVES, False] == 1
    core.look(121.0 + 3700.0)
    assert core._batches == {}


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


# After a restart


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


def test_the_error_of_predicted_first_tokens_is_known(core):
    assert core.state(0.0).ttft_error is None
    core.heard(ingress(replace(OK, predicted_ttft_s=0.15), replace(OK, predicted_ttft_s=0.1), OK), 1.0)
    error = core.state(1.0).ttft_error
    assert error.samples == 2
    assert error.mape == pytest.approx(0.25)


# Tiers of one's own


def ended(tier, request=OK, times=1):
    return [replace(request, tier=tier)] * times


def test_a_monitor_of_other_tiers_measures_and_sheds_those():
    core = MonitorCore(replace(SETTINGS, tiers=FOUR), 0.0)
    core.heard(router(), 100.0)
    core.heard(ingress(*ended(TEXT, LATE, 20), *ended(FILE, OK, 5)), 100.0)
    assert core.look(101.0) is SteerReason.TOP_TIER_AT_RISK
    assert core.policy.shed == {FILE: 0.25}
    state = core.state(101.0)
    assert tuple(state.tiers) == FOUR.names
    assert state.tiers[SEARCH].target == 0.95
    assert state.tiers[TEXT].at_risk
    assert {series.tier for series in core.series(101.0)} == {TEXT, FILE}


def test_directives_follow_the_ranks_of_the_set():
    core = MonitorCore(replace(SETTINGS, tiers=FOUR), 0.0)
    step = StepSeen(7, (SEARCH,), 2.0, 0.1, KeepReason.WAITERS_IN_TIME)
    lower, higher = WaiterSeen(JobId("file"), FILE, 1.0), WaiterSeen(JobId("image"), IMAGE, 1.0)
    assert core.heard(prefill(step=step, waiting=[lower]), 0.0).directives == ()
    (directive,) = core.heard(prefill(step=step, waiting=[lower, higher]), 0.0).directives
    assert directive.beneficiary == "image"


def test_a_deployment_that_changes_its_tiers_leaves_nothing_of_the_old_ones():
    core = MonitorCore(SETTINGS, 0.0)
    core.heard(router(), 100.0)
    core.heard(ingress(*[LATE] * 20), 100.0)
    core.look(101.0)
    assert core.policy.shed == {BACKGROUND: 0.25}
    core.heard(ingress(*ended(IMAGE), settings=replace(SETTINGS, tiers=FOUR)), 102.0)
    core.heard(ingress(*ended(PREMIUM)), 102.0)  # from one that has not heard of the change
    core.look(103.0)
    assert core.policy.shed == {}
    state = core.state(103.0)
    assert tuple(state.tiers) == FOUR.names
    assert {series.tier for series in core.series(103.0)} == {IMAGE}


def test_whoever_sizes_the_fleet_hears_the_routers_demand_and_who_is_at_risk(core):
    demand = FleetDemand(PrefillDemand(1.5, 2.0), DecodeDemand(0.5, 3))
    assert core.demand(0.0) is None
    core.heard(MonitorReport("router", Role.ROUTER, 0, RouterSeen({}, {}, demand)), 1.0)
    assert core.demand(1.0) == demand
    core.heard(ingress(*[LATE] * 20), 2.0)
    core.look(3.0)
    assert core.demand(3.0) == replace(demand, prefill=PrefillDemand(1.5, 2.0, at_risk=True))
    assert core.demand(10.0) is None, "the router has fallen silent"


@pytest.mark.parametrize(
    "ended",
    [
        replace(OK, tpot_s=0.2, tpot_budget_s=0.1),
        replace(OK, outcome=Outcome.FAILED),
        replace(OK, outcome=Outcome.EVICTED),
        replace(OK, outcome=Outcome.SHED, ttft_s=None, lacked_decode=True),
    ],
    ids=["late tokens", "failed", "evicted", "no memory on decode"],
)
def test_what_prefill_could_not_help_asks_for_no_prefill_replica(core, ended):
    demand = FleetDemand(PrefillDemand(1.5, 2.0), DecodeDemand(0.5, 3))
    core.heard(MonitorReport("router", Role.ROUTER, 0, RouterSeen({}, {}, demand)), 1.0)
    core.heard(ingress(*[ended] * 20), 2.0)
    core.look(3.0)
    assert core.state(3.0).tiers[PREMIUM].at_risk
    assert core.demand(3.0) == demand
