"""For whom the monitor has a running prefill preempted."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo.monitor.directives import (
    DirectiveReason,
    ReplicaSeen,
    StepSeen,
    WaiterSeen,
    direct,
    first_of_each,
)
from slo.preemption.types import KeepReason
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

R = ReplicaId("r")
STEP = StepSeen(7, (BACKGROUND,), remaining_s=2.0, preemptible_in_s=0.1, kept=KeepReason.WAITERS_IN_TIME)
HARM = replace(STEP, kept=KeepReason.WOULD_HARM)
URGENT = WaiterSeen(JobId("urgent"), PREMIUM, 1.0)
NOBODY, AT_RISK_PREMIUM = frozenset(), frozenset({PREMIUM})


def ordered(step, *waiting, at_risk=NOBODY):
    directive = direct(ReplicaSeen(R, step, waiting), at_risk, DEFAULT_TIERS)
    return None if directive is None else (directive.step_id, directive.beneficiary, directive.reason)


OUT_OF_TIME = (7, "urgent", DirectiveReason.OUT_OF_TIME)
AT_RISK = (7, "urgent", DirectiveReason.TIER_AT_RISK)

TABLE = {
    "late behind the step, in time without it": (STEP, [URGENT], NOBODY, OUT_OF_TIME),
    "nothing runs": (None, [URGENT], NOBODY, None),
    "nobody waits": (STEP, [], NOBODY, None),
    "in time behind the step": (STEP, [replace(URGENT, slack_s=2.0)], NOBODY, None),
    "late in any case": (STEP, [replace(URGENT, slack_s=0.05)], NOBODY, None),
    "no deadline": (STEP, [replace(URGENT, slack_s=math.inf)], NOBODY, None),
    "a limit is in the way": (replace(STEP, preemptible_in_s=None), [URGENT], AT_RISK_PREMIUM, None),
    "the governor has not decided yet": (replace(STEP, kept=None), [URGENT], AT_RISK_PREMIUM, None),
    "the same tier": (replace(STEP, tiers=(BACKGROUND, PREMIUM)), [URGENT], NOBODY, None),
    "a warm-up is preempted for anybody": (replace(STEP, tiers=()), [URGENT], NOBODY, OUT_OF_TIME),
    "stopping would harm as much": (HARM, [URGENT], NOBODY, None),
    "but the waiter's tier is at risk": (HARM, [URGENT], AT_RISK_PREMIUM, AT_RISK),
    "or the margin forbade it": (replace(STEP, kept=KeepReason.MARGIN), [URGENT], AT_RISK_PREMIUM, AT_RISK),
    "the step's tier is at risk too": (HARM, [URGENT], frozenset({PREMIUM, BACKGROUND}), None),
    "the governor cannot save it": (
        replace(STEP, kept=KeepReason.CANNOT_SAVE),
        [URGENT],
        AT_RISK_PREMIUM,
        None,
    ),
    "the step is owed its turn": (replace(STEP, kept=KeepReason.PROTECTED), [URGENT], AT_RISK_PREMIUM, None),
    "the most valuable first": (
        STEP,
        [WaiterSeen(JobId("standard"), STANDARD, 0.2), URGENT, replace(URGENT, slack_s=1.5)],
        NOBODY,
        OUT_OF_TIME,
    ),
    "the next one when the first is none": (
        HARM,
        [replace(URGENT, slack_s=3.0), WaiterSeen(JobId("urgent"), STANDARD, 0.2)],
        frozenset({STANDARD}),
        AT_RISK,
    ),
}


@pytest.mark.parametrize(("step", "waiting", "at_risk", "expected"), TABLE.values(), ids=TABLE)
def test_who_is_made_way_for(step, waiting, at_risk, expected):
    assert ordered(step, *waiting, at_risk=at_risk) == expected


tiers = st.sampled_from(DEFAULT_TIERS.names)


@settings(deadline=None)
@given(
    st.lists(tiers, max_size=3),
    st.lists(st.tuples(tiers, st.just(math.inf) | st.floats(-5, 5)), max_size=5),
    st.sampled_from(list(KeepReason)),
    st.sets(tiers),
)
def test_nobody_is_stopped_for_an_equal_or_for_one_who_is_not_saved_by_it(members, waiting, kept, at_risk):
    step = replace(STEP, tiers=tuple(members), kept=kept)
    waiters = [WaiterSeen(JobId(str(n)), tier, slack_s) for n, (tier, slack_s) in enumerate(waiting)]
    found = direct(ReplicaSeen(R, step, tuple(waiters)), at_risk, DEFAULT_TIERS)
    if found is not None:
        waiter = waiters[int(found.beneficiary)]
        assert all(DEFAULT_TIERS.rank(waiter.tier) > DEFAULT_TIERS.rank(tier) for tier in members)
        assert step.preemptible_in_s <= waiter.slack_s < step.remaining_s
        assert kept in {KeepReason.WAITERS_IN_TIME, KeepReason.WOULD_HARM, KeepReason.MARGIN}


@settings(deadline=None)
@given(
    st.lists(tiers, max_size=2),
    st.lists(st.tuples(tiers, st.sampled_from([0.05, 0.2, 0.5, 1.0, 1.9, 3.0, math.inf])), max_size=12),
    st.none() | st.sampled_from(list(KeepReason)),
    st.none() | st.just(0.1),
    st.sets(tiers),
)
def test_whom_a_replica_leaves_out_the_monitor_would_not_choose(
    members, waiting, kept, preemptible_in_s, at_risk
):
    step = replace(STEP, tiers=tuple(members), kept=kept, preemptible_in_s=preemptible_in_s)
    waiters = [WaiterSeen(JobId(str(n)), tier, slack_s) for n, (tier, slack_s) in enumerate(waiting)]
    told = first_of_each(one for one in waiters if step.makes_late(one.tier, one.slack_s))
    few = ReplicaSeen(R, step, told if step.may_be_stopped else ())
    assert len(few.waiting) <= len(DEFAULT_TIERS.names)
    assert direct(few, at_risk, DEFAULT_TIERS) == direct(
        ReplicaSeen(R, step, tuple(waiters)), at_risk, DEFAULT_TIERS
    )
