"""Replicas that are slower than they say are corrected, and the margin covers what remains."""

import random
from dataclasses import replace

import pytest
from monitor_reports import SETTINGS, R, ingress, prefill, slow

from slo.monitor.core import FORGET_AFTER_S, SETTLE_S, MonitorCore
from slo.monitor.policy import ClusterPolicy
from slo.predict.prediction_error import MIN_SAMPLES
from slo.request import ReplicaId


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
