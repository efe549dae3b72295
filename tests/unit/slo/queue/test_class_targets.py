"""How much of its misses each class has used up, and what its requests count for by it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued_prefills import job, names

from slo.queue.class_targets import LEAST_BURN, MOST_BURN, ClassCounts, ClassPrices, ClassTargets
from slo.queue.feasible_set import feasible_set
from slo.queue.order import QueueOrder, order
from slo.tiers import Tier

CHAT, FILES = Tier("chat"), Tier("files")
TARGETS = {CHAT: 0.9, FILES: 0.9}
NOBODY = ()


def served(account, tier, count, missed=0, now_s=0.0, work_s=None):
    for number in range(count):
        if work_s is not None:
            account.arrived(tier, work_s, now_s)
        account.ended(tier, now_s - 1.0 if number < missed else now_s + 1.0, now_s)
    return account


def test_the_price_is_the_misses_over_those_allowed():
    account = served(ClassTargets(TARGETS), CHAT, 1000, missed=50)
    prices = account.state.at(NOBODY, 0.0)
    assert prices.price(CHAT) == pytest.approx(0.5, rel=0.02)
    assert prices.price(FILES) == 1.0  # nothing is known of it


def test_a_strict_target_makes_a_class_dear_sooner():
    account = ClassTargets({CHAT: 0.99, FILES: 0.9})
    for tier in (CHAT, FILES):
        served(account, tier, 1000, missed=30)
    prices = account.state.at(NOBODY, 0.0)
    assert prices.price(CHAT) > 5 * prices.price(FILES)


def test_of_each_class_those_are_dear_that_are_short_for_it():
    account = served(ClassTargets(TARGETS), CHAT, 100, work_s=0.1)
    served(account, FILES, 100, work_s=2.0)
    prices = account.state.at(NOBODY, 0.0)
    assert prices.price(FILES) / prices.price(CHAT) == pytest.approx(20.0)


def test_with_a_strict_target_work_does_not_count():
    account = served(ClassTargets(dict.fromkeys(TARGETS, 0.99)), CHAT, 100, work_s=0.1)
    served(account, FILES, 100, work_s=2.0)
    prices = account.state.at(NOBODY, 0.0)
    assert prices.price(FILES) == pytest.approx(prices.price(CHAT))


def test_those_that_will_be_late_count_as_missed_while_they_still_wait():
    state = served(ClassTargets(TARGETS), FILES, 100).state
    calm = state.at(NOBODY, 0.0).price(FILES)
    late = [job(str(number), due_s=0.5, tier=FILES) for number in range(30)]
    assert state.at(late, 0.0).price(FILES) > 1.0 > calm
    assert state.at([job("met", 1.0, tier=FILES), job("undated", tier=FILES)], 0.0).price(FILES) == calm


def test_what_has_no_deadline_or_no_target_is_not_counted():
    account = served(ClassTargets(TARGETS), Tier("other"), 5, missed=5, work_s=1.0)
    account.ended(CHAT, math.inf, 0.0)
    assert account.state.counts.get(CHAT, ClassCounts()).ended == 0
    assert account.state.at(NOBODY, 0.0).price(Tier("other")) == 1.0


def test_old_misses_are_forgotten_even_over_a_long_time():
    account = served(ClassTargets(TARGETS, memory_s=10.0), CHAT, 100, missed=100)
    assert account.state.at(NOBODY, 0.0).price(CHAT) == MOST_BURN
    served(account, CHAT, 100, now_s=100.0)
    assert account.state.at(NOBODY, 100.0).price(CHAT) == LEAST_BURN
    served(account, CHAT, 1, now_s=100_000.0)
    assert account.state.counts[CHAT].ended == pytest.approx(1.0)
    assert account.state.counts[CHAT].missed == pytest.approx(0.0, abs=1e-9)


def test_the_class_that_has_missed_more_is_kept():
    """Two that cannot both be on time: by work alone it is always the long one that is left out."""
    queue = [job("short", 3.0, tier=CHAT), job("long", 3.0, 2.5, tier=FILES)]
    assert names(feasible_set(queue, 0.0).feasible) == ["short"]
    account = served(served(ClassTargets(TARGETS), CHAT, 1000), FILES, 1000, missed=200)
    prices = account.state.at(queue, 0.0)
    assert names(feasible_set(queue, 0.0, prices=prices).feasible) == ["long"]
    assert names(order(QueueOrder.FEASIBLE_SET, queue, 0.0, targets=account.state)) == ["long", "short"]
    assert names(order(QueueOrder.FEASIBLE_SET, queue, 0.0)) == ["short", "long"]


def test_a_margin_is_kept_by_how_strict_the_target_is():
    prices = ClassTargets({CHAT: 0.99, FILES: 0.9}).state.at(NOBODY, 0.0)
    assert prices.insured(FILES, 3.0) == pytest.approx(1.0)
    assert prices.insured(CHAT, 3.0) == pytest.approx(3.0)
    assert prices.insured(Tier("other"), 3.0) == 3.0


@given(st.floats(0.01, 0.9999), st.floats(0.01, 0.9999), st.floats(1, 100))
def test_a_stricter_target_never_has_less_of_the_margin(lax, strict, margin):
    lax, strict = sorted((lax, strict))
    prices = ClassPrices({CHAT: 1 - lax, FILES: 1 - strict}, {})
    assert 1.0 <= prices.insured(CHAT, margin) <= prices.insured(FILES, margin) <= margin * (1 + 1e-9)


@given(
    st.lists(
        st.tuples(st.sampled_from([CHAT, FILES]), st.floats(0, 100), st.booleans(), st.floats(0.001, 50)),
        max_size=40,
    )
)
def test_no_account_asks_for_what_cannot_be(ends):
    account = ClassTargets(TARGETS)
    for tier, at_s, is_late, work_s in sorted(ends, key=lambda end: end[1]):
        account.arrived(tier, work_s, at_s)
        account.ended(tier, at_s - 1.0 if is_late else at_s + 1.0, at_s)
    works = [work_s for *_, work_s in ends] or [1.0]
    prices = account.state.at(NOBODY, 100.0)
    for tier, counts in account.state.counts.items():
        assert 0.0 <= counts.missed <= counts.ended * (1 + 1e-9)
        assert min(1.0, *works, 1.0) * LEAST_BURN * 0.999 <= prices.price(tier)
        assert prices.price(tier) <= max(1.0, *works, 1.0) * MOST_BURN * 1.001


def test_one_class_alone_is_ordered_as_without_targets():
    queue = [job(str(number), 1.0 + number, 1.0 + number % 3, tier=CHAT) for number in range(12)]
    state = served(ClassTargets(TARGETS), CHAT, 50, missed=9, work_s=0.7).state
    assert feasible_set(queue, 0.0, prices=state.at(queue, 0.0)) == feasible_set(queue, 0.0)
