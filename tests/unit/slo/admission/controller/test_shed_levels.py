"""What the monitor has a tier shed is taken from what it asks for above its share, and from nothing else."""

from collections import Counter
from dataclasses import replace

import pytest
from admission_offers import LACK, NO_BACKLOG, WORK_S, controller, offer, offered, part_admitted, request
from hypothesis import given, settings
from hypothesis import strategies as st

from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRequest
from slo.admission.tenant_limits import Usage
from slo.autoscaling.need import DecodeDemand
from slo.errors import Rejected, RejectionReason
from slo.monitor.shedding import SteeringRules
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

SHARES = {tier: policy.share for tier, policy in DEFAULT_TIERS.items()}


@pytest.mark.parametrize("premium", [0.1, 2.0], ids=["at ease", "under pressure"])
def test_a_tier_within_its_share_loses_nothing_whatever_the_level(premium):
    admission = controller()
    admission.follow({BACKGROUND: 1.0, STANDARD: 0.75}, 0.3)
    fates = offer(admission, offered(premium=premium, standard=0.3, background=0.12))
    assert all(set(fate) == {"admitted"} for fate in fates.values())


@pytest.mark.parametrize("level", [0.25, 0.75, 1.0])
@pytest.mark.parametrize(("asked", "replicas"), [(0.5, 1.0), (0.7, 4.0)])
def test_of_what_is_above_the_share_the_levels_part_is_refused(level, asked, replicas):
    """`asked` is a part of the fleet, below its pressure."""
    admission = controller(replicas=replicas)
    admission.follow({BACKGROUND: level}, 0.0)
    fate = offer(admission, offered(background=asked * replicas), seconds=600.0)[BACKGROUND, "a"]
    assert set(fate) == {"admitted", RejectionReason.SHED_BY_POLICY}
    let_in = asked - level * (asked - SHARES[BACKGROUND])
    assert part_admitted(fate) * asked == pytest.approx(let_in, rel=0.1)


@settings(max_examples=15, deadline=None)
@given(
    loads=st.fixed_dictionaries({tier: st.floats(0.05, 2.0) for tier in DEFAULT_TIERS.names}),
    levels=st.fixed_dictionaries({BACKGROUND: st.floats(0, 1), STANDARD: st.floats(0, 0.75)}),
    reserved=st.floats(0, 0.3),
    hog=st.floats(0.1, 0.9),
    seed=st.integers(0, 99),
)
def test_every_tier_gets_its_share_if_it_wants_it_whatever_the_levels(loads, levels, reserved, hog, seed):
    """With two tenants in each, one of which asks for more than the other, on two replicas."""
    replicas = 2.0
    admission = controller(replicas=replicas, seed=seed)
    admission.follow(levels, reserved)
    asked = {
        (tier, tenant): load * part * replicas
        for tier, load in loads.items()
        for tenant, part in (("hog", hog), ("other", 1 - hog))
    }
    fates = offer(admission, asked, seconds=260.0)
    for tier, load in loads.items():
        got = sum(part_admitted(fates[key]) * asked[key] for key in asked if key[0] == tier) / replicas
        # Of n requests drawn with chance p the number varies with a standard deviation of sqrt(n p (1 - p)).
        deviation = (load * WORK_S / 200.0 / replicas) ** 0.5 / 2
        assert got >= min(load, SHARES[tier]) * 0.95 - 4 * deviation
        if tier != PREMIUM and load <= 0.9 * SHARES[tier]:
            assert sum(fates[key][RejectionReason.SHED_BY_POLICY] for key in asked if key[0] == tier) == 0


def test_what_a_level_refuses_is_not_refused_for_the_share_again():
    """Ten times its share is asked for, on a fleet that others fill; the most that is refused for the share
    is four fifths."""
    admission = controller()
    admission.follow({BACKGROUND: 1.0}, 0.0)
    fate = offer(admission, offered(premium=0.85, background=1.5), seconds=900.0)[BACKGROUND, "a"]
    assert part_admitted(fate) * 1.5 == pytest.approx(SHARES[BACKGROUND], rel=0.15)
    admission = controller()
    admission.follow({BACKGROUND: 0.25}, 0.0)
    fate = offer(admission, offered(premium=0.85, background=0.5), seconds=900.0)[BACKGROUND, "a"]
    assert min(fate[RejectionReason.SHED_BY_POLICY], sum(fate[reason] for reason in LACK)) > 0
    assert part_admitted(fate) * 0.5 == pytest.approx(SHARES[BACKGROUND], rel=0.15), "the rest for its share"


def test_what_only_decode_can_compute_is_shed_as_its_tier_is():
    """It takes nothing of the share; what its tier asks for of that decides."""
    admission = controller()
    admission.follow({BACKGROUND: 1.0}, 0.0)

    def refused(now_s):
        asked = AdmissionRequest(JobId(f"{now_s}"), BACKGROUND, "a", Usage(1), 0.0, only_decode=True)
        decision = admission.decide(asked, now_s)
        return isinstance(decision, Rejected) and decision.reason is RejectionReason.SHED_BY_POLICY

    assert not any(refused(0.01 * number) for number in range(100))
    admission.decide(request("much", work_s=60.0), 2.0)
    assert sum(refused(3.0 + 0.01 * number) for number in range(100)) > 85


def crowded(replicas=1.0, work_s=0.0):
    """Background has a third of decode, which is nine tenths full by streams, and may have no more.

    It has just had so much work of prefill for that.
    """
    admission = controller(replicas=replicas)
    for tier, many, asked_s in ((PREMIUM, 66, 0.0), (BACKGROUND, 33, work_s)):
        for number in range(many):
            there = request(f"there-{number}", tier, work_s=asked_s / many)
            assert admission.decide(there, 0.0) is None
            admission.served(there.job_id)
    admission.decode.sees(DecodeDemand(0.2, 99, pace=0.9, replicas=1))
    admission.follow({BACKGROUND: 1.0}, 0.0)
    return admission


def test_what_is_shed_for_the_share_of_decode_alone_is_asked_of_decode_and_not_of_prefill():
    """Of prefill it asks for a twentieth of what the fleet can do."""
    admission = crowded(replicas=10.0)
    for number in range(400):
        refused = admission.decide(replace(request(number), likeness=number % 33), 0.2 * number)
        assert refused is not None
        assert (refused.reason, refused.lacked_decode) == (RejectionReason.SHED_BY_POLICY, True)
    work, _ = admission.demand(80.0)
    assert work == pytest.approx(0.0, abs=1e-9)
    assert admission.refused_work(80.0) == 0.0
    assert admission.decode.replicas_refused(80.0) == pytest.approx(0.3), "those that are there once more"


def test_what_is_shed_for_the_share_of_prefill_too_is_asked_of_prefill():
    """A tenth of what it asks for is its share."""
    admission = crowded(work_s=SHARES[BACKGROUND] * 20.0 * 10)
    decisions = [admission.decide(request(number, work_s=0.01), 0.2) for number in range(1000)]
    assert {refused.reason for refused in decisions} == {RejectionReason.SHED_BY_POLICY}
    work_s = 0.01 * sum(not refused.lacked_decode for refused in decisions)
    assert work_s == pytest.approx(9.0, rel=0.05)
    assert admission.refused_work(0.2) == pytest.approx(work_s / 20.0, rel=0.05)


def test_what_is_shed_for_decode_does_not_change_what_is_asked_of_prefill_beside_it():
    """Background asks for half of what the fleet can do, which is far above its share, for four minutes."""
    admission = crowded(work_s=0.5 * 20.0)
    decisions = [
        admission.decide(replace(request(number, work_s=0.05), likeness=number % 33), 0.1 * number)
        for number in range(2400)
    ]
    of_decode = [refused.lacked_decode for refused in decisions[1200:]]
    assert sum(of_decode) / 1200 == pytest.approx(SHARES[BACKGROUND] / 0.5, rel=0.25)
    work, _ = admission.demand(240.0)
    assert work == pytest.approx(0.5 - SHARES[BACKGROUND], rel=0.25)
    assert admission.refused_work(240.0) == pytest.approx(work, rel=0.05)


def test_what_is_shed_for_decode_takes_nothing_of_prefill_from_others():
    """With what background asks for, which never comes to prefill, the fleet would be under pressure."""
    admission = crowded()
    admission.decide(request("queue", STANDARD), 0.0)
    for number in range(2000):
        at_s = 0.1 * number
        asked = request(number, work_s=0.9 * SHARES[BACKGROUND] * 0.1)
        shed = admission.decide(replace(asked, likeness=number % 33), at_s)
        assert (shed.reason, shed.lacked_decode) == (RejectionReason.SHED_BY_POLICY, True)
        other = request(number, STANDARD, work_s=0.75 * 0.1)
        assert admission.decide(other, at_s) is None
        admission.ended(other.job_id, at_s)
    assert admission.load(200.0) == pytest.approx(0.75, rel=0.02)


def test_a_tier_that_is_shed_for_decode_too_has_its_share_of_prefill_and_no_more():
    admission = crowded()
    admission.follow({}, 0.0)
    assert admission.decide(request("queue"), 0.0) is None
    admission.follow({BACKGROUND: 0.25}, 0.0)
    fate = offer(admission, offered(premium=2.0, background=0.3), seconds=900.0)[BACKGROUND, "a"]
    assert part_admitted(fate) * 0.3 == pytest.approx(SHARES[BACKGROUND], rel=0.08)


def test_what_only_decode_can_compute_and_is_shed_for_its_share_lacks_decode():
    admission = crowded(work_s=SHARES[BACKGROUND] * 20.0 * 10)
    refused = [
        admission.decide(replace(request(number), only_decode=True), 0.01 * number) for number in range(50)
    ]
    assert {one.lacked_decode for one in refused} == {True}


def test_what_is_shed_while_decode_is_at_ease_is_asked_of_prefill():
    admission = crowded()
    admission.decode.sees(DecodeDemand(0.2, 99, pace=0.3, replicas=1))
    decisions = [admission.decide(request(number), 0.05 * number) for number in range(200)]
    assert {refused.lacked_decode for refused in decisions if refused is not None} == {False}
    assert admission.decode.replicas_refused(10.0) == 0.0


def test_without_a_prefill_replica_no_level_refuses_anybody():
    admission = controller(NO_BACKLOG, replicas=0.0)
    admission.follow({BACKGROUND: 1.0}, 0.0)
    assert set(offer(admission, offered(background=5.0))[BACKGROUND, "a"]) == {"admitted"}


@pytest.mark.parametrize("load", [0.5, 4.0])
def test_who_is_shed_comes_back_no_sooner_than_a_level_falls(load):
    admission = controller()
    admission.follow({BACKGROUND: 1.0}, 0.0)
    decisions = [admission.decide(request(number), WORK_S / load * number) for number in range(300)]
    shed = [one for one in decisions if one and one.reason is RejectionReason.SHED_BY_POLICY]
    assert shed
    assert all(SteeringRules().relax_every_s <= one.retry_after_s <= 60.0 for one in shed)


@pytest.mark.parametrize("replicas", [1.0, 4.0])
@pytest.mark.parametrize("beside_s", [0.05, 0.25], ids=["just after others", "by itself"])
@pytest.mark.parametrize("work_s", [6.0, 12.0, 30.0])
def test_a_tier_within_its_share_loses_nothing_though_its_prompts_are_few_and_long(
    work_s, beside_s, replicas
):
    """Two thirds of its share, in prompts each of which is more than the share of the last 20 s."""
    fates, part = few_and_long(work_s, part=0.1, replicas=replicas, level=1.0, beside_s=beside_s)
    assert set(fates) == {None}
    assert part == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("work_s", [6.0, 12.0, 30.0])
@pytest.mark.parametrize("asked", [0.3, 1.0])
def test_a_tier_that_asks_for_more_than_its_share_in_few_long_prompts_is_shed_to_it(work_s, asked):
    fates, part = few_and_long(work_s, part=asked, replicas=1.0, level=1.0, beside_s=0.25)
    assert set(fates) == {None, RejectionReason.SHED_BY_POLICY}
    assert part == pytest.approx(SHARES[BACKGROUND], rel=0.15)


def test_what_a_tier_left_of_its_share_does_not_let_in_a_flood():
    """It has asked for next to nothing for an hour; what it leaves is for a queue that others barely see."""
    admission = controller(NO_BACKLOG)
    admission.follow({BACKGROUND: 1.0}, 0.0)
    admission.decide(request(0, work_s=0.01), 0.0)
    admission.served(request(0).job_id)
    decisions = [
        admission.decide(request(number, work_s=1.0), 3600.0 + 0.1 * number) for number in range(1, 301)
    ]
    admitted = sum(decision is None for decision in decisions)
    assert 10 <= admitted <= 20, "the calm queue, and hardly more than its share since"


def test_what_a_tier_had_above_its_share_is_not_paid_back_while_there_is_no_prefill():
    """Others alone ask meanwhile, by whom the router finds that there is none."""
    admission = controller()
    admission.follow({BACKGROUND: 1.0}, 0.0)
    assert admission.decide(request(0, work_s=40.0), 0.0) is None
    admission.served(request(0).job_id)
    admission.capacity_changed(0.0, 1.0)
    admission.capacity_changed(1.0, 400.0)
    refused = admission.decide(request(1, work_s=30.0), 400.0)
    assert refused is not None
    assert refused.reason is RejectionReason.SHED_BY_POLICY
    assert admission.decide(request(2, work_s=30.0), 800.0) is None


@pytest.mark.parametrize("leaves", [AdmissionController.not_for_prefill, None])
def test_what_is_not_prefilled_after_all_takes_nothing_of_the_share(leaves):
    admission = controller()
    admission.follow({BACKGROUND: 1.0}, 0.0)
    for number in range(20):
        one = request(number, work_s=30.0)
        assert admission.decide(one, float(number)) is None
        if leaves is not None:
            leaves(admission, one.job_id)
        admission.withdrawn(one.job_id, float(number))


def few_and_long(work_s, part, replicas, level, beside_s, hours=4):
    """What becomes of a tier's prompts, and which part of the fleet is admitted of it, beside premium."""
    admission = controller(replicas=replicas)
    admission.follow({BACKGROUND: level}, 0.3)
    fates, every_s, end_s, number = Counter(), work_s / part / replicas, 3600.0 * hours, 0
    due_s = 1.0
    for second in range(int(end_s)):
        premium = AdmissionRequest(JobId(f"p{second}"), PREMIUM, "p", Usage(1), 0.3 * replicas)
        assert admission.decide(premium, float(second)) is None
        admission.served(premium.job_id)
        admission.ended(premium.job_id, float(second))
        while due_s <= second:
            due_s, number = due_s + every_s, number + 1
            one = request(number, work_s=work_s)
            decision = admission.decide(one, second + beside_s)
            fates[decision and decision.reason] += 1
            admission.ended(one.job_id, second + beside_s)
    return fates, fates[None] * work_s / end_s / replicas
