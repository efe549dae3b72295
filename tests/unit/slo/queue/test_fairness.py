"""Nobody is left behind for ever, and nobody above pays more for it than the share of those below."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo.queue.fairness import STARVATION_TIMEOUT_S, TARDY_PART, Fairness
from slo.queue.order import QueueOrder, order
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

NEVER = math.inf


def fair(**rules):
    return Fairness(DEFAULT_TIERS, **rules)


def busy(fairness, tier=PREMIUM, until_s=0.0):
    """The replica has served nothing but one class."""
    fairness.step_ended({tier: 1}, 100.0, until_s)
    return fairness


def job(name, tier, due_s=NEVER, arrived_s=0.0, work_s=1.0, **history):
    weight = DEFAULT_TIERS[tier].weight
    return Prefill(JobId(name), weight, due_s, work_s, arrived_s, tier=tier, **history)


def names(prefills, now_s, fairness, kind=QueueOrder.FEASIBLE_SET):
    return [prefill.job_id for prefill in order(kind, prefills, now_s, fairness=fairness)]


# Ageing: among what is late or has no deadline.


def test_what_is_late_goes_by_tier_and_age():
    queue = [
        job("background", BACKGROUND, arrived_s=90.0),
        job("late standard", STANDARD, due_s=99.0, arrived_s=98.0),
        job("late premium", PREMIUM, due_s=99.0, arrived_s=98.0),
        job("on time", BACKGROUND, due_s=200.0, arrived_s=99.0),
    ]
    assert names(queue, 100.0, busy(fair())) == ["on time", "late premium", "late standard", "background"]


def test_background_that_has_waited_passes_standard_but_not_premium():
    queue = [
        job("late standard", STANDARD, due_s=99.0, arrived_s=98.0),
        job("late premium", PREMIUM, due_s=99.0, arrived_s=98.0),
        job("background", BACKGROUND, arrived_s=75.0),
    ]
    assert names(queue, 100.0, busy(fair())) == ["late premium", "background", "late standard"]


def test_a_class_below_its_share_counts_for_more():
    queue = [
        job("standard", STANDARD, arrived_s=100.0),
        job("background", BACKGROUND, arrived_s=84.0),
    ]
    served = fair()
    served.step_ended({STANDARD: 1}, 50.0, 0.0)
    served.step_ended({BACKGROUND: 1}, 50.0, 0.0)
    assert names(queue, 100.0, served) == ["standard", "background"]  # 1.0, and 16 s * 0.05 = 0.8
    served.step_ended({STANDARD: 1}, 1000.0, 0.0)
    assert names(queue, 100.0, served) == ["background", "standard"]  # 1.0, and 0.8 + 2 * (0.15 - 0.045)


def test_the_stopped_go_first_among_the_late():
    queue = [job("late", PREMIUM, due_s=1.0), job("stopped", BACKGROUND, preemptions=1)]
    assert names(queue, 9.0, busy(fair())) == ["stopped", "late"]


# Leads.


def waiting_behind(waited_s, **premium):
    """A background prefill that has waited so long, with premium and standard that are on time."""
    now_s = 1000.0
    return [
        job("standard", STANDARD, due_s=now_s + 5, arrived_s=now_s - 1),
        job("premium", PREMIUM, due_s=now_s + 9, arrived_s=now_s - 1),
        job("background", BACKGROUND, arrived_s=now_s - waited_s),
        job("behind it", BACKGROUND, arrived_s=now_s - waited_s + 0.5),
    ]


@pytest.mark.parametrize("kind", QueueOrder)
@pytest.mark.parametrize(
    ("waited_s", "order_of_queue", "guard"),
    [
        (STARVATION_TIMEOUT_S - 1, ["standard", "premium", "background", "behind it"], None),
        (STARVATION_TIMEOUT_S + 1, ["premium", "background", "standard", "behind it"], pytest.approx(8**0.5)),
        (2 * STARVATION_TIMEOUT_S + 1, ["background", "standard", "premium", "behind it"], math.inf),
    ],
)
def test_the_head_of_a_class_below_its_share_leads(kind, waited_s, order_of_queue, guard):
    fairness, queue = busy(fair()), waiting_behind(waited_s)
    assert names(queue, 1000.0, fairness, kind) == order_of_queue
    boost = fairness.boost_of(queue[2], 1000.0)
    assert (None if boost is None else boost.guard) == guard


def test_a_class_that_has_its_share_does_not_lead():
    fairness, queue = busy(fair(), BACKGROUND), waiting_behind(2 * STARVATION_TIMEOUT_S + 1)
    assert names(queue, 1000.0, fairness) == ["standard", "premium", "background", "behind it"]
    assert fairness.boost_of(queue[2], 1000.0) is None


@pytest.mark.parametrize("kind", QueueOrder)
@pytest.mark.parametrize("waited_s", [STARVATION_TIMEOUT_S + 1, 2 * STARVATION_TIMEOUT_S + 1])
def test_what_is_on_time_uses_the_right_of_its_class_first(kind, waited_s):
    now_s = 1000.0
    queue = [
        job("standard", STANDARD, due_s=now_s + 5, arrived_s=now_s - 1),
        job("late", PREMIUM, due_s=now_s - waited_s + 1, arrived_s=now_s - waited_s),
        job("premium", PREMIUM, due_s=now_s + 1.5, arrived_s=now_s - 1),
    ]
    fairness = busy(fair(), STANDARD)
    assert names(queue, now_s, fairness, kind) == ["premium", "late", "standard"]
    assert names(queue[:2], now_s, fairness, kind) == ["late", "standard"]


def test_a_class_leads_less_with_what_is_late_anyway():
    fairness, share = busy(fair()), DEFAULT_TIERS[BACKGROUND].share
    late = job("late", BACKGROUND, due_s=20.0)
    for head, counts in ((job("not late", BACKGROUND), 1.0), (late, 1.0 / TARDY_PART)):
        now_s = 1000.0 * counts
        boost = fairness.boost_of(head, now_s)
        fairness.step_ended({BACKGROUND: 10}, 1.0, now_s + 1.0, boost)
        fairness.step_ended({PREMIUM: 1}, 1e6, now_s + 1.0)
        next_s = now_s + counts / share
        assert fairness.boost_of(late, next_s - 0.01) is None
        assert fairness.boost_of(late, next_s + 0.01) is not None


def test_with_infinite_patience_nobody_leads():
    queue = waiting_behind(900.0)
    assert names(queue, 1000.0, busy(fair(starvation_timeout_s=NEVER)))[0] == "standard"


TIERS = st.sampled_from(DEFAULT_TIERS.names)


@st.composite
def queues(draw):
    """Prefills of all tiers, late, on time or without a deadline, and who has been served what."""
    now_s = 200.0
    queue = [
        job(
            str(number),
            draw(TIERS),
            draw(st.one_of(st.just(NEVER), st.floats(150, 400))),
            draw(st.floats(0, now_s)),
            draw(st.floats(0.01, 20)),
        )
        for number in range(draw(st.integers(0, 8)))
    ]
    fairness = fair()
    for tier in draw(st.lists(TIERS, max_size=3)):
        fairness.step_ended({tier: 1}, draw(st.floats(0.1, 50)), 100.0)
    return queue, fairness, now_s


@given(queues(), st.sampled_from(QueueOrder))
def test_fairness_neither_loses_nor_invents_anybody(drawn, kind):
    queue, fairness, now_s = drawn
    assert sorted(names(queue, now_s, fairness, kind)) == sorted(prefill.job_id for prefill in queue)


@given(queues(), st.sampled_from(QueueOrder))
def test_premium_on_time_goes_before_what_has_aged_but_not_twice_the_patience(drawn, kind):
    """The order among the others aside: without deadlines of their own, they are behind."""
    queue, fairness, now_s = drawn
    queue = [p for p in queue if p.tier == PREMIUM or p.deadline_s == NEVER]
    queue = [p for p in queue if now_s - p.arrived_s <= 2 * STARVATION_TIMEOUT_S]
    for position, ahead in enumerate(ordered := order(kind, queue, now_s, fairness=fairness)):
        for behind in ordered[position + 1 :]:
            if behind.tier == PREMIUM and now_s + behind.remaining_s <= behind.deadline_s < NEVER:
                alone = order(kind, [p for p in queue if p.tier == PREMIUM], now_s)
                on_time_ahead = sum(p.remaining_s for p in alone[: alone.index(behind) + 1])
                is_kept = now_s + on_time_ahead <= behind.deadline_s
                assert ahead.tier == PREMIUM or not is_kept


@settings(max_examples=60, deadline=None)
@given(
    works=st.lists(st.floats(0.05, 6.0), min_size=2, max_size=12),
    premium_s=st.floats(0.05, 1.0),
    tiers=st.lists(st.sampled_from([BACKGROUND, STANDARD]), min_size=12, max_size=12),
    lateness=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_nobody_starves_behind_a_stream_that_is_always_on_time(works, premium_s, tiers, lateness):
    """A replica that never stops a step, and a queue in which there is always premium that can be met."""
    fairness = fair()
    shares = {tier: policy.share for tier, policy in DEFAULT_TIERS.items()}
    left = {
        JobId(str(number)): job(str(number), tier, 0.0 if is_late else NEVER, work_s=work_s)
        for number, (work_s, tier, is_late) in enumerate(zip(works, tiers, lateness, strict=False))
    }
    longest_s = max([*works, premium_s])
    started = dict.fromkeys((BACKGROUND, STANDARD), (0.0, 0.0))
    count, now_s = 0, 0.0
    led_s = premium_served_s = 0.0
    while left:
        stream = [
            job(f"premium {count + n}", PREMIUM, now_s + 50 * premium_s, now_s, premium_s) for n in (0, 1)
        ]
        count += 2
        first = order(QueueOrder.FEASIBLE_SET, [*left.values(), *stream], now_s, fairness=fairness)[0]
        boost = fairness.boost_of(first, now_s)
        if left.pop(first.job_id, None) is not None:
            before_s, work_s = started[first.tier]
            bound_s = max(2 * STARVATION_TIMEOUT_S, before_s + work_s / shares[first.tier]) + 3 * longest_s
            assert now_s <= bound_s + 1e-6, f"{first.tier} waited until {now_s:.1f}"
            counts = 1.0 / TARDY_PART if first.deadline_s < NEVER else 1.0
            started[first.tier] = now_s, counts * first.remaining_s
            led_s += first.remaining_s
        else:
            premium_served_s += premium_s
        now_s += first.remaining_s
        fairness.step_ended({first.tier: 10}, first.remaining_s, now_s, boost)
    allowed = sum(shares[tier] for tier in set(tiers[: len(works)]))
    assert led_s <= allowed * now_s + 2 * longest_s


def test_a_step_is_charged_to_its_members_by_their_tokens():
    fairness = fair()
    fairness.step_ended({PREMIUM: 300, BACKGROUND: 100}, 4.0, 4.0)
    assert fairness.account.achieved(PREMIUM) == pytest.approx(0.75)
