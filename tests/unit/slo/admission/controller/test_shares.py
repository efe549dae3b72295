"""Under pressure a class over its share is refused, and what is kept for the top tier is kept."""

import time
from collections import Counter

import pytest
from admission_offers import LACK, WORK_S, controller, offer, offered, part_admitted, request
from hypothesis import given, settings
from hypothesis import strategies as st

from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantLimit
from slo.errors import Rejected, RejectionReason
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

SHARES = {tier: policy.share for tier, policy in DEFAULT_TIERS.items()}


def test_below_the_pressure_everybody_is_admitted():
    for fates in offer(controller(), offered(premium=0.1, background=0.65)).values():
        assert set(fates) == {"admitted"}


def test_under_pressure_the_class_over_its_share_is_refused_and_no_other():
    fates = offer(controller(), offered(premium=0.4, standard=0.3, background=1.0))
    premium, standard, background = fates.values()
    assert set(premium) == set(standard) == {"admitted"}
    assert background[RejectionReason.OVER_SHARE] > 0
    assert 0.2 <= part_admitted(background) <= 0.4  # 0.3 is left, 0.2 is the least


def test_the_chance_grows_with_the_excess_up_to_its_limit():
    admitted = [
        part_admitted(offer(controller(), offered(premium=0.5, background=load))[BACKGROUND, "a"])
        for load in (0.3, 0.45, 0.9, 2.0, 9.0)
    ]
    assert admitted == sorted(admitted, reverse=True)
    assert admitted[0] > 0.9
    assert admitted[-1] == pytest.approx(0.2, abs=0.03)


def test_premium_is_admitted_whatever_the_load():
    fates = offer(controller(), offered(premium=1.5, standard=2.0, background=2.0))
    assert set(fates[PREMIUM, "a"]) == {"admitted"}


def test_time_is_kept_for_premium_that_does_not_ask_for_it():
    half = AdmissionRules(reserved=0.5, max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0)
    without = AdmissionRules(reserved=0.0, max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0)
    kept, free = (offer(controller(rules), offered(background=0.9)) for rules in (half, without))
    kept, free = kept[BACKGROUND, "a"], free[BACKGROUND, "a"]
    assert part_admitted(free) > 0.9
    assert kept[RejectionReason.RESERVED] > 0
    assert part_admitted(kept) == pytest.approx(0.5 / 0.9, abs=0.12)


def test_a_tenant_that_asks_for_less_than_its_part_is_not_refused_for_another():
    loads = {(BACKGROUND, "greedy"): 2.0, (BACKGROUND, "modest"): 0.2}
    greedy, modest = offer(controller(), loads).values()
    assert set(modest) == {"admitted"}
    assert greedy[RejectionReason.TENANT_SHARE] + greedy[RejectionReason.OVER_SHARE] > 0


def test_a_heavier_tenant_gets_more_of_a_busy_class():
    loads = {(BACKGROUND, "heavy"): 1.2, (BACKGROUND, "light"): 1.2}
    heavy, light = offer(controller(heavy=TenantLimit(weight=3.0)), loads).values()
    assert part_admitted(heavy) == pytest.approx(3 * part_admitted(light), rel=0.35)


@settings(max_examples=25, deadline=None)
@given(
    loads=st.fixed_dictionaries({tier: st.floats(0.05, 3.0) for tier in DEFAULT_TIERS.names}),
    replicas=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_nobody_within_their_share_is_refused_for_lack_of_capacity(loads, replicas, seed):
    """Loads as parts of the fleet."""
    admission = controller(replicas=float(replicas), seed=seed)
    scaled = {(tier, "a"): load * replicas for tier, load in loads.items()}
    fates = offer(admission, scaled, seconds=50.0, warm_s=0.0)
    for (tier, _), fate in fates.items():
        refused = sum(count for reason, count in fate.items() if reason in LACK)
        # The account starts with a whole request where half of one is the mean.
        within = loads[tier] + WORK_S / 20 <= SHARES[tier]
        assert not (within or tier == PREMIUM) or refused == 0
        assert fate["admitted"] > 0
    if sum(loads.values()) + 3 * WORK_S / 20 <= 0.8:
        assert all(set(fate) == {"admitted"} for fate in fates.values())


@settings(max_examples=25, deadline=None)
@given(
    premium=st.floats(0, 1.2),
    reserved=st.floats(0, 0.5),
    background=st.floats(0.1, 4),
    seed=st.integers(0, 9),
)
def test_what_is_let_in_leaves_the_reservation_unless_the_share_or_the_limit_is_larger(
    premium, reserved, background, seed
):
    loads = offered(**({"premium": premium} if premium > 0.01 else {}), background=background)
    rules = AdmissionRules(reserved=reserved, max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0)
    fates = offer(controller(rules, seed=seed), loads, seconds=200.0)
    let_in = part_admitted(fates[BACKGROUND, "a"]) * background
    share = SHARES[BACKGROUND]
    pressed = premium + background > 0.8
    allowed = max(1.0 - max(premium, reserved), share, 0.2 * background, 0.0 if pressed else background)
    assert let_in <= allowed * 1.2 + 0.1


def test_a_policy_sheds_what_may_be_shed_until_another_comes():
    admission = controller(replicas=10.0)
    admission.follow({BACKGROUND: 1.0, STANDARD: 0.5, PREMIUM: 1.0}, 0.1)
    loads = offered(premium=6.0, standard=7.0, background=7.0)
    premium, standard, background = offer(admission, loads).values()
    assert set(premium) == {"admitted"}
    assert background[RejectionReason.SHED_BY_POLICY] > standard[RejectionReason.SHED_BY_POLICY] > 0
    admission.follow({}, 0.1)
    fates = offer(admission, loads).values()
    assert all(fate[RejectionReason.SHED_BY_POLICY] == 0 for fate in fates)


@pytest.mark.parametrize(("configured", "from_outside"), [(0.0, 0.6), (0.6, 0.0)])
def test_the_larger_of_the_two_reservations_holds(configured, from_outside):
    admission = controller(
        AdmissionRules(reserved=configured, max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0)
    )
    admission.follow({}, from_outside)
    fates = offer(admission, offered(background=0.9))[BACKGROUND, "a"]
    assert fates[RejectionReason.RESERVED] > 0


def test_without_a_replica_nobody_is_refused_here():
    admission = controller(replicas=0.0)
    assert set(offer(admission, offered(background=5.0))[BACKGROUND, "a"]) == {"admitted"}


def test_retry_after_grows_with_the_load_and_is_bounded():
    waits = []
    for load in (1.0, 3.0, 1000.0):
        admission = controller(
            AdmissionRules(max_backlog_s=1e9, max_late_backlog_s=1e9, memory_s=20.0, calm_s=0.0)
        )
        admission.decide(request("first", work_s=load * 10.0), 0.0)
        decisions = [admission.decide(request(n, work_s=load * 10.0), 0.2) for n in range(100)]
        waits.append(next(d.retry_after_s for d in decisions if isinstance(d, Rejected)))
    assert 1.0 <= waits[0] < waits[1] <= waits[2] <= 60.0
    assert waits[1] == pytest.approx(20.0 * 1.3, rel=0.1)  # 20 s * ln(3 / 0.8)


def test_what_is_too_much_is_taken_from_the_long_in_proportion_to_their_work():
    """A request of ten times the work is refused ten times as often, and no more work is refused in all."""
    admission = controller(AdmissionRules(max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0))
    admission.decide(request("queue", tokens=1), 0.0)
    refused, asked_s, refused_s = Counter(), 0.0, 0.0
    for number in range(8000):
        is_long = number % 10 == 0
        work_s = 10 * WORK_S if is_long else WORK_S
        now_s = number * 1.9 * WORK_S / 1.25
        decision = admission.decide(request(number, work_s=work_s), now_s)
        if now_s > 60.0:
            asked_s += work_s
            refused_s += work_s * (decision is not None)
            refused[is_long] += decision is not None
        admission.served(request(number).job_id)
    assert refused_s / asked_s == pytest.approx(1 - (0.98 - 0.1) / 1.25, abs=0.05), "a tenth is reserved"
    assert refused[True] == pytest.approx(10 / 9 * refused[False], rel=0.25), "one of ten is long"


def test_the_same_seed_gives_the_same_decisions():
    loads = offered(standard=0.7, background=1.0)
    assert offer(controller(seed=3), loads) == offer(controller(seed=3), loads)


def test_a_decision_takes_microseconds():
    limit = TenantLimit(requests_per_s=1e9, tokens_per_s=1e9, max_concurrent=10**9)
    admission = controller(replicas=10.0, **{f"tenant-{n}": limit for n in range(100)})
    asked = [request(n, DEFAULT_TIERS.names[n % 3], f"tenant-{n % 100}", 0.3) for n in range(4000)]
    took_s = []
    for n, one in enumerate(asked):
        started_s = time.thread_time()
        admission.decide(one, n / 100)
        took_s.append(time.thread_time() - started_s)
    took_s.sort()
    assert took_s[len(took_s) // 2] < 200e-6
    assert took_s[int(len(took_s) * 0.999)] < 0.05
