"""To whom directives go, and for whom."""

from dataclasses import replace

from monitor_reports import LATE, SETTINGS, R, ingress, prefill

from slo.monitor.core import MonitorCore
from slo.monitor.directives import DirectiveReason, StepSeen, WaiterSeen
from slo.preemption.types import KeepReason
from slo.request import JobId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD


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
