"""Arms that aim at the targets of classes."""

import pytest

from simulator.arms.arms import ARMS
from simulator.arms.by_class import BY_CLASS, with_classes
from simulator.fleet.outcome import attainment_by
from simulator.study.goodput import Experiment
from simulator.study.presets import PRESETS
from simulator.study.run import run

PRESET = PRESETS["flowprefill-8b"]
HARDWARE, MIX = with_classes(PRESET.hardware, PRESET.workload, 0.9)


def attained(arm, load=1.25, hardware=HARDWARE, mix=MIX):
    rate_rps = load * Experiment(PRESET.hardware, PRESET.workload, 0, (1,)).capacity_rps()
    jobs = [job for seed in (1, 2) for job in run(arm, hardware, mix.stream(rate_rps, 1000, seed)).jobs]
    return attainment_by(jobs, "kind")


@pytest.mark.parametrize("name", [name for name in BY_CLASS if name != "targets-chunked"])
def test_every_arm_serves(name):
    assert min(attained(BY_CLASS[name], load=0.5).values()) > 0.9


def test_classes_fare_more_alike_than_when_all_requests_are():
    alike, aiming = attained(ARMS["slackserve"]), attained(BY_CLASS["targets"])
    assert min(aiming.values()) > min(alike.values()) + 0.01
    assert max(aiming.values()) - min(aiming.values()) < max(alike.values()) - min(alike.values())


def test_the_stream_is_the_same_to_those_who_know_no_classes():
    arm = ARMS["sedf-resume"]
    there = run(arm, PRESET.hardware, PRESET.workload.stream(8.0, 300, 1), arm.settings[0]).jobs
    here = run(arm, HARDWARE, MIX.stream(8.0, 300, 1), arm.settings[0]).jobs
    assert [job.first_token_s for job in here] == [job.first_token_s for job in there]


def test_each_kind_is_a_class_with_the_target():
    assert HARDWARE.tiers.targets == dict.fromkeys(MIX.kinds, 0.9)
    assert {kind.tier for kind in MIX.kinds.values()} == set(MIX.kinds)
