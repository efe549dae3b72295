"""Who is let into a fleet that cannot serve everybody."""

import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_tiers import FILE, FOUR, IMAGE, SEARCH, SEVEN, TEXT

from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRequest, AdmissionRules
from slo.admission.tenant_limits import KeyLimit, TenantGates, TenantLimit, Usage
from slo.errors import Rejected, RejectionReason
from slo.outcomes import Outcome, outcome_of
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM, Tier, TierPolicy, TierSet

WORK_S = 0.1
SHARES = {tier: policy.share for tier, policy in DEFAULT_TIERS.items()}
LACK = {RejectionReason.OVER_SHARE, RejectionReason.RESERVED, RejectionReason.TENANT_SHARE}
NO_BACKLOG = AdmissionRules(max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0)


def controller(rules=NO_BACKLOG, replicas=1.0, seed=1, tenants=None, **limits):
    made = AdmissionController(
        DEFAULT_TIERS, rules, tenants or TenantGates(limits), random.Random(seed).random
    )
    made.has_capacity(replicas)
    return made


def request(number, tier=BACKGROUND, tenant="a", work_s=WORK_S, tokens=100):
    return AdmissionRequest(JobId(f"{tier}-{tenant}-{number}"), tier, tenant, Usage(tokens), work_s)


def offer(admission, loads, seconds=120.0, warm_s=60.0, serve=True):
    """Evenly spaced requests at the given load of each (tier, tenant); what became of them after a while."""
    arrivals = sorted(
        (number * WORK_S / load, key, number)
        for key, load in loads.items()
        for number in range(int(seconds * load / WORK_S))
    )
    for tier in {tier for tier, _ in loads}:  # a queue that is never done
        admission.decide(request("queue", tier, tokens=1), 0.0)
    fates = {key: Counter() for key in loads}
    for at_s, (tier, tenant), number in arrivals:
        asked = request(number, tier, tenant)
        decision = admission.decide(asked, at_s)
        if serve:
            admission.ended(asked.job_id, at_s)
        if at_s >= warm_s:
            fates[tier, tenant][getattr(decision, "reason", "admitted")] += 1
    return fates


def part_admitted(fates):
    return fates["admitted"] / sum(fates.values())


def offered(**by_tier):
    return {(Tier(name), "a"): load for name, load in by_tier.items()}


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
    tenants = TenantGates({"heavy": TenantLimit(weight=3.0)})
    loads = {(BACKGROUND, "heavy"): 1.2, (BACKGROUND, "light"): 1.2}
    heavy, light = offer(controller(tenants=tenants), loads).values()
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


def test_a_queue_that_would_take_too_long_is_not_lengthened():
    admission = controller(AdmissionRules(max_backlog_s=10.0, max_refusal=0.5))
    decisions = [admission.decide(request(n, work_s=1.0), n * 0.01) for n in range(200)]
    backlog = [d for d in decisions if getattr(d, "reason", None) is RejectionReason.BACKLOG]
    assert backlog
    assert all(1.0 <= d.retry_after_s <= 60.0 for d in backlog)
    assert admission.backlog_s(BACKGROUND) <= 12.0
    for n in range(200):
        admission.served(JobId(f"background-a-{n}"))
    assert admission.backlog_s(BACKGROUND) == 0.0
    assert admission.decide(request(999), 60.0) is None


def test_a_client_that_waits_for_each_answer_is_not_refused():
    admission, now_s = controller(AdmissionRules()), 0.0
    for number in range(500):
        asked = request(number)
        assert admission.decide(asked, now_s) is None
        now_s += WORK_S
        admission.ended(asked.job_id, now_s)
    assert admission.load(now_s) > 0.8


def test_tenant_limits_refuse_before_anything_is_counted():
    admission = controller(a=TenantLimit(requests_per_s=1.0, burst_requests=1))
    assert admission.decide(request(0), 0.0) is None
    for n in range(1, 500):
        refused = admission.decide(request(n), 0.0)
        assert refused == Rejected(RejectionReason.REQUEST_RATE, 1.0)
    assert admission.load(1.0) < 0.02
    assert admission.decide(request(500), 1.0) is None


def test_concurrency_is_freed_by_the_end_of_a_request_not_of_its_prefill():
    admission = controller(a=TenantLimit(max_concurrent=1))
    first, second = request(0), request(1)
    assert admission.decide(first, 0.0) is None
    admission.served(first.job_id)
    assert admission.decide(second, 1.0).reason is RejectionReason.CONCURRENCY
    admission.ended(first.job_id, 2.0)
    admission.ended(first.job_id, 2.0)
    assert admission.decide(second, 3.0) is None
    assert admission.decide(request(2), 3.0).reason is RejectionReason.CONCURRENCY


def test_a_request_whose_end_nobody_reports_is_forgotten():
    admission = controller(a=TenantLimit(max_concurrent=1), b=TenantLimit())
    assert admission.decide(request(0), 0.0) is None
    assert admission.decide(request(1, tenant="b"), 3700.0) is None
    assert admission.decide(request(1), 3701.0) is None


def test_a_request_that_is_placed_again_is_not_counted_again():
    admission = controller(a=TenantLimit(max_concurrent=1, requests_per_s=0.001))
    for now_s in (0.0, 1.0, 2.0):
        assert admission.decide(request(0), now_s) is None
    assert admission.backlog_s(BACKGROUND) == pytest.approx(WORK_S)


def test_the_servers_own_requests_know_no_limits():
    admission = controller(a=TenantLimit(max_concurrent=1))
    admission.follow(dict.fromkeys((*DEFAULT_TIERS.names, SYSTEM), 1.0), 1.0)
    for n in range(50):
        assert admission.decide(request(n, SYSTEM), 0.0) is None
    assert admission.load(0.0) == 0.0


def test_a_policy_sheds_what_may_be_shed_until_another_comes():
    admission = controller()
    admission.follow({BACKGROUND: 1.0, STANDARD: 0.5, PREMIUM: 1.0}, 0.1)
    fates = offer(admission, offered(premium=0.1, standard=0.1, background=0.1))
    premium, standard, background = fates.values()
    assert set(premium) == {"admitted"}
    assert set(background) == {RejectionReason.SHED_BY_POLICY}
    assert part_admitted(standard) == pytest.approx(0.5, abs=0.2)
    admission.follow({}, 0.1)
    assert admission.decide(request(10**6), 1000.0) is None


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


@pytest.mark.parametrize("reason", RejectionReason)
def test_limits_reject_and_the_state_of_the_fleet_sheds(reason):
    own = {
        RejectionReason.REQUEST_RATE,
        RejectionReason.TOKEN_RATE,
        RejectionReason.OUTPUT_TOKEN_RATE,
        RejectionReason.CONCURRENCY,
    }
    assert outcome_of(reason) is (Outcome.REJECTED if reason in own else Outcome.SHED)


def test_a_decision_takes_microseconds():
    tenants = TenantGates({}, TenantLimit(requests_per_s=1e9, tokens_per_s=1e9, max_concurrent=10**9))
    admission = controller(replicas=10.0, tenants=tenants)
    asked = [request(n, DEFAULT_TIERS.names[n % 3], f"tenant-{n % 100}", 0.3) for n in range(4000)]
    took_s = []
    for n, one in enumerate(asked):
        started_s = time.perf_counter()
        admission.decide(one, n / 100)
        took_s.append(time.perf_counter() - started_s)
    took_s.sort()
    assert took_s[len(took_s) // 2] < 200e-6
    assert took_s[int(len(took_s) * 0.999)] < 0.05


# Tiers of one's own


def of_tiers(tiers, rules=NO_BACKLOG):
    made = AdmissionController(tiers, rules, TenantGates({}), random.Random(1).random)
    made.has_capacity(1.0)
    return made


@pytest.mark.parametrize("tiers", [FOUR, SEVEN], ids=["four", "seven"])
def test_the_top_tier_and_what_may_not_be_shed_are_never_refused(tiers):
    fates = offer(of_tiers(tiers), {(tier, "a"): 1.0 for tier in tiers.names})
    for (tier, _), fate in fates.items():
        if tier in tiers.sheddable:
            assert sum(fate[reason] for reason in LACK) > 0, tier
        else:
            assert set(fate) == {"admitted"}, tier


def test_what_the_monitor_sheds_is_refused_by_name():
    admission = of_tiers(SEVEN)
    admission.follow(dict.fromkeys(SEVEN.names, 1.0), 0.0)
    for tier in SEVEN.names:
        decision = admission.decide(request(1, tier), 0.0)
        refused = isinstance(decision, Rejected) and decision.reason is RejectionReason.SHED_BY_POLICY
        assert refused == (tier in SEVEN.sheddable), tier


def test_the_reservation_is_kept_for_the_top_tier():
    rules = AdmissionRules(max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0, reserved=0.5)
    loads = {(TEXT, "a"): 0.1, (IMAGE, "a"): 0.6, (SEARCH, "a"): 0.6, (FILE, "a"): 0.6}
    without, kept = (offer(of_tiers(FOUR, each), loads) for each in (NO_BACKLOG, rules))
    assert set(kept[TEXT, "a"]) == {"admitted"}
    assert any(fate[RejectionReason.RESERVED] for fate in kept.values())
    admitted = [sum(fate["admitted"] for fate in fates.values()) for fates in (without, kept)]
    assert admitted[1] < admitted[0]


@pytest.mark.parametrize("tier", [PREMIUM, STANDARD, BACKGROUND])
def test_no_class_has_a_queue_without_end(tier):
    """Twenty thousand requests at once; the fleet does two seconds of work in a second."""
    admission = controller(AdmissionRules(max_backlog_s=120.0, max_late_backlog_s=30.0), replicas=2.0)
    decisions = [admission.decide(request(number, tier, work_s=1.0), 0.0) for number in range(20_000)]
    assert admission.backlog_s(tier) <= 2 * (30.0 if tier == PREMIUM else 120.0) + 1.0
    refused = decisions[-1]
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectionReason.BACKLOG or tier != PREMIUM
    assert refused.retry_after_s >= 1.0


@pytest.mark.parametrize(
    ("policy", "longest_s"),
    [
        (TierPolicy(0.5, None, sheddable=False, weight=1), 30.0),
        (TierPolicy(None, None, sheddable=False, weight=1, ttft_scale=3.0), 30.0),
        (TierPolicy(50.0, None, sheddable=False, weight=1), 50.0),
        (TierPolicy(500.0, None, sheddable=False, weight=1), 120.0),
        (TierPolicy(None, None, sheddable=False, weight=1, e2e_s=5.0), 30.0),
        (TierPolicy(50.0, None, sheddable=False, weight=1, e2e_s=40.0), 40.0),
        (TierPolicy(None, None, sheddable=False, weight=1), 120.0),
        (TierPolicy(0.5, None, sheddable=True, weight=1), 120.0),
    ],
)
def test_how_long_a_queue_may_be(policy, longest_s):
    rules = AdmissionRules(max_backlog_s=120.0, max_late_backlog_s=30.0, calm_s=1e9)
    tiers = TierSet({TEXT: policy}, default=TEXT)
    admission = AdmissionController(tiers, rules, TenantGates({}), random.Random(1).random)
    admission.has_capacity(1.0)
    for number in range(300):
        admission.decide(request(number, TEXT, work_s=1.0), 0.0)
    assert admission.backlog_s(TEXT) == longest_s + 1.0


@pytest.mark.parametrize("objective", [{"ttft_s": 5.0}, {"ttft_s": None, "e2e_s": 5.0}])
def test_what_has_a_deadline_orders_replicas_and_leaves_nobody_behind_in_an_overload(objective):
    """An end-to-end objective is a deadline of the first token, too."""
    tiers = TierSet({TEXT: TierPolicy(tpot_s=None, sheddable=False, weight=1, **objective)}, default=TEXT)
    admission = AdmissionController(tiers, AdmissionRules(), TenantGates({}), lambda: 0.99)
    admission.has_capacity(1.0)
    for number in range(200):
        admission.decide(request(number, TEXT, work_s=1.0), 0.5 * number)
    assert admission.demand(100.0)[1] == admission.backlog_s(TEXT) > 0
    assert isinstance(admission.decide(request("late", TEXT), 100.0), Rejected), "the oldest waits for long"
    assert admission.backlog_s(TEXT) < 30.0


def test_the_servers_own_requests_are_never_refused():
    admission = controller(AdmissionRules(max_backlog_s=1.0))
    assert [admission.decide(request(number, SYSTEM, work_s=1.0), 0.0) for number in range(100)] == [
        None
    ] * 100


def asked(number, asker="ingress", tenant="one"):
    return AdmissionRequest(JobId(f"{asker}-{number}"), STANDARD, tenant, Usage(100), WORK_S, asker, number)


def admitted(admission, request, now_s=0.0):
    return admission.decide(request, now_s) is None


def test_an_end_that_was_not_heard_of_does_not_keep_a_tenant_out():
    admission = controller(one=TenantLimit(max_concurrent=1))
    assert admitted(admission, asked(1))
    assert not admitted(admission, asked(2))
    assert admission.reconcile("ingress", 2, [JobId("ingress-1")], 1.0) == []
    assert not admitted(admission, asked(3), 1.0)
    assert admission.reconcile("ingress", 3, [], 2.0) == ["ingress-1"]
    assert admitted(admission, asked(4), 2.0)


def test_what_was_asked_after_the_word_was_given_is_left_alone():
    admission = controller()
    for number in (1, 2):
        assert admitted(admission, asked(number))
    assert admission.reconcile("ingress", 1, [], 1.0) == ["ingress-1"]


def test_nobody_speaks_for_others():
    admission = controller()
    assert admitted(admission, asked(1, "another"))
    assert admission.reconcile("ingress", 99, [], 1.0) == []


def test_who_is_silent_while_others_speak_is_gone_and_its_requests_with_it():
    admission = controller()
    assert admitted(admission, asked(1, "lost"))
    assert admission.reconcile("lost", 1, [JobId("lost-1")], 0.0) == []
    ended = [admission.reconcile("ingress", 0, [], now_s) for now_s in (10.0, 20.0, 30.0, 40.0)]
    assert ended == [[], [], [], ["lost-1"]]


@pytest.mark.parametrize("spoke", [True, False], ids=["spoke", "died before it spoke"])
def test_who_is_silent_is_gone_too_when_the_next_speaks_only_long_after(spoke):
    admission = controller()
    assert admitted(admission, asked(1, "lost"))
    if spoke:
        assert admission.reconcile("lost", 1, [JobId("lost-1")], 0.0) == []
    ended = [admission.reconcile("new", 0, [], now_s) for now_s in (40.0, 50.0, 60.0, 71.0)]
    assert ended == [[], [], [], ["lost-1"]]


def test_a_router_that_was_stopped_blames_nobody():
    admission = controller()
    assert admitted(admission, asked(1, "a"))
    assert admitted(admission, asked(1, "b"))
    for name in "ab":
        admission.reconcile(name, 1, [JobId(f"{name}-1")], 0.0)
    assert admission.reconcile("a", 1, [JobId("a-1")], 100.0) == []
    assert admission.reconcile("b", 1, [JobId("b-1")], 100.1) == []


def test_nor_does_it_when_one_that_is_new_asks_first():
    admission = controller()
    assert admitted(admission, asked(1, "a"))
    admission.reconcile("a", 1, [JobId("a-1")], 0.0)
    assert admitted(admission, asked(1, "new"), 100.0)
    assert admission.reconcile("new", 1, [JobId("new-1")], 100.1) == []


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "end", "lose", "tell"]), st.sampled_from("ab")), max_size=60)
)
def test_after_everybody_has_spoken_the_account_is_that_of_what_lives(events):
    admission = controller()
    live, count = {"a": set(), "b": set()}, Counter()
    for number, (event, asker) in enumerate(events):
        now_s = number / 2  # nobody is silent for so long that it is gone
        match event:
            case "ask":
                count[asker] += 1
                if admitted(admission, asked(count[asker], asker), now_s):
                    live[asker].add(JobId(f"{asker}-{count[asker]}"))
            case "end" if live[asker]:
                admission.ended(live[asker].pop(), now_s)
            case "lose" if live[asker]:  # the router does not hear of it
                live[asker].pop()
            case "tell":
                admission.reconcile(asker, count[asker], live[asker], now_s)
    for asker in "ab":
        admission.reconcile(asker, count[asker], live[asker], len(events) / 2)
    assert set(admission._jobs) == live["a"] | live["b"]
    assert admission.backlog_s(STANDARD) == pytest.approx(WORK_S * len(admission._jobs))


def test_the_demand_counts_what_is_refused_and_of_what_waits_only_what_has_an_objective():
    admission = controller(replicas=2.0)
    admission.follow({BACKGROUND: 1.0}, 0.1)
    for number in range(2000):
        admission.decide(request(number, BACKGROUND), number / 20)
        if number % 2 == 0:
            asked = request(number, STANDARD)
            admission.decide(asked, number / 20)
            admission.ended(asked.job_id, number / 20)
    admission.decide(request("waits", PREMIUM, work_s=3.0), 100.0)
    work, backlog_s = admission.demand(100.0)
    assert work == pytest.approx(20 * WORK_S + 10 * WORK_S + 3 / 20, rel=0.1)
    assert backlog_s == pytest.approx(3.0)


def test_a_key_is_held_to_its_own_limits_and_its_tenants():
    admission = controller(a=TenantLimit(max_concurrent=3))
    ci = KeyLimit("ci", TenantLimit(max_concurrent=2, tokens_per_s=1, burst_tokens=250))
    jobs = [replace(request(number), key_limit=ci) for number in range(6)]
    assert [admission.decide(job, 0.0) for job in jobs[:2]] == [None, None]
    refused = admission.decide(jobs[2], 0.0)
    assert (refused.reason, refused.key_name) == (RejectionReason.CONCURRENCY, "ci")
    assert admission.decide(request(9), 0.0) is None, "others of its tenant are not held to it"
    refused = admission.decide(jobs[2], 0.0)
    assert (refused.reason, refused.key_name) == (RejectionReason.CONCURRENCY, None), "its tenant's"
    admission.ended(request(9).job_id, 1.0)
    admission.ended(jobs[0].job_id, 1.0, Usage(100))
    refused = admission.decide(jobs[3], 1.0)
    assert (refused.reason, refused.key_name) == (RejectionReason.TOKEN_RATE, "ci"), "51 of 250 are left"
    admission.ended(jobs[1].job_id, 1.0, Usage(0))
    assert admission.decide(jobs[3], 1.0) is None, "what the second did not take is given back"
    other = replace(request(0, tenant="b"), key_limit=ci)
    assert admission.decide(other, 1.0) is None, "a key of another tenant with the same name is another"


def test_a_refusal_by_a_key_takes_nothing_of_its_tenant():
    admission = controller(a=TenantLimit(requests_per_s=0.001, burst_requests=2))
    ci = KeyLimit("ci", TenantLimit(requests_per_s=0.001, burst_requests=1))
    assert admission.decide(replace(request(0), key_limit=ci), 0.0) is None
    for number in range(1, 9):
        assert admission.decide(replace(request(number), key_limit=ci), 0.0).key_name == "ci"
    assert admission.decide(request(9), 0.0) is None


def test_limits_of_a_key_that_change_hold_from_then_on():
    admission = controller()
    one, two = (KeyLimit("ci", TenantLimit(max_concurrent=most)) for most in (1, 2))
    jobs = [replace(request(number), key_limit=one) for number in range(9)]
    assert admission.decide(jobs[0], 0.0) is None
    assert admission.decide(jobs[1], 0.0) is not None
    assert admission.decide(replace(jobs[1], key_limit=two), 0.0) is None
    admission.ended(jobs[0].job_id, 1.0)
    assert admission.decide(replace(jobs[2], key_limit=two), 1.0) is None, "the old one does not come back"
    assert admission.decide(replace(jobs[3], key_limit=two), 1.0) is not None


def test_what_was_admitted_before_a_restart_is_not_taken_from_what_is_asked_for_now():
    admission = controller()
    for number in range(10):
        admission.decide(request(number, STANDARD), 0.1 * number)
    load = admission.load(2.0)
    for number in range(30):
        admission.waits(JobId(f"old-{number}"), STANDARD, WORK_S, 2.0)
        admission.not_for_prefill(JobId(f"old-{number}"))
    assert admission.load(2.2) == pytest.approx(load, rel=0.05)
    assert admission.backlog_s(STANDARD) == pytest.approx(10 * WORK_S)
