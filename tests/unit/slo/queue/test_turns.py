"""Turns are fair by work between tenants, and between the tiers of one or within each tier."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.queue.turns import FairTurns, TierTurns
from slo.request import Party
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM, Tier

A, B, C = (Party(name, PREMIUM) for name in "abc")
LOW = Party("a", BACKGROUND)


def turns(*waiting):
    made = FairTurns()
    for number, (party, work) in enumerate(waiting):
        made.add(party, (party, number), work)
    return made


def order(made):
    return [made.pop() for _ in range(len(made))]


def test_one_party_goes_in_the_order_in_which_it_came():
    assert [number for _, number in order(turns(*[(A, 1.0)] * 5))] == [0, 1, 2, 3, 4]


def test_who_has_come_with_many_does_not_pass_who_has_come_later_with_one():
    made = turns(*[(A, 10.0)] * 50)
    assert made.pop() == (A, 0)
    made.add(B, "of b", 10.0)
    assert made.pop() == "of b"


def test_short_ones_have_more_turns_and_the_same_work():
    made = turns(*[(A, 100.0)] * 50, *[(B, 10.0)] * 200)
    seen = Counter(party for party, _ in (made.pop() for _ in range(110)))
    assert seen[B] == pytest.approx(10 * seen[A], abs=10)


def test_a_heavier_tenant_has_more_work_done():
    made = turns(*[(A, 1.0)] * 50)
    for number in range(50):
        made.add(B, (B, number), 1.0, 3.0)
    seen = Counter(party for party, _ in (made.pop() for _ in range(40)))
    assert seen[B] == pytest.approx(3 * seen[A], abs=3)


def test_nobody_saves_turns_up_while_they_have_nothing():
    made = turns(*[(A, 1.0)] * 50)
    for _ in range(40):
        made.pop()
    for number in range(5):
        made.add(B, ("b", number), 1.0)
    first = [made.pop()[0] for _ in range(6)]
    assert first.count("b") == 3, "in turn, and not all of b's first"


def test_the_tiers_of_a_tenant_share_what_is_the_tenants():
    made = turns(*[(A, 1.0)] * 30, *[(LOW, 1.0)] * 30, *[(B, 1.0)] * 30)
    seen = Counter(party for party, _ in (made.pop() for _ in range(40)))
    assert seen == {A: 10, LOW: 10, B: 20}


def test_who_waits_no_more_is_passed():
    made = FairTurns()
    for party, item in ((A, "one"), (A, "two"), (B, "three")):
        made.add(party, item, 1.0)
    made.remove(A, "one")
    made.remove(A, "one")
    made.remove(C, "one")
    assert (len(made), sorted(order(made))) == (2, ["three", "two"])
    with pytest.raises(IndexError):
        made.pop()


@given(st.lists(st.tuples(st.sampled_from([A, B, C, LOW, None]), st.floats(0.1, 100.0)), max_size=80))
def test_between_two_that_always_wait_the_work_differs_by_one_turn_at_most(events):
    """None is a turn; a and b have always something else waiting."""
    made, done = FairTurns(), Counter()
    largest = max((work for _, work in events), default=1.0)
    for tenant in "ab":
        for _ in range(len(events) + 1):
            made.add(Party(tenant, PREMIUM), (tenant, largest), largest)
    for party, work in events:
        if party is not None and party.tenant == "c":
            made.add(party, ("c", work), work)
        elif party is None:
            tenant, had = made.pop()
            done[tenant] += had
            assert abs(done["a"] - done["b"]) <= largest + 1e-6


def by_tier(*waiting):
    made = TierTurns(DEFAULT_TIERS)
    for party, item in waiting:
        made.add(party, item, 1.0)
    return made


def test_a_higher_tier_goes_first_whatever_its_tenant_has_had():
    made = by_tier(*[(LOW, "low")] * 3, *[(A, "high")] * 3, (Party("b", STANDARD), "middle"))
    assert order(made) == ["high"] * 3 + ["middle"] + ["low"] * 3


def test_within_a_tier_tenants_take_turns():
    assert order(by_tier((A, "a"), (A, "a"), (A, "a"), (B, "b"))) == ["a", "b", "a", "a"]


@pytest.mark.parametrize("tier", [SYSTEM, Tier("unknown")])
def test_what_the_server_does_itself_is_of_the_lowest_tier_and_so_is_one_that_is_not_known(tier):
    made = by_tier((Party("", tier), "own"), (LOW, "low"), (Party("c", STANDARD), "middle"))
    assert order(made) == ["middle", "own", "low"]


def test_who_waits_no_more_is_passed_in_each_tier():
    made = by_tier((A, "high"), (LOW, "low"), (LOW, "other"))
    for party, item in ((A, "high"), (A, "high"), (LOW, "low"), (C, "low")):
        made.remove(party, item)
    assert (len(made), order(made)) == (1, ["other"])
    with pytest.raises(IndexError):
        made.pop()


def test_tiers_that_are_always_passed_have_a_turn_now_and_then():
    middle = Party("a", STANDARD)
    made = by_tier(*[(A, "high")] * 60, *[(middle, "middle")] * 60, *[(LOW, "low")] * 60)
    taken = [made.pop() for _ in range(27)]
    assert taken == (["high"] * 7 + ["middle", "low"]) * 3


def test_who_comes_when_nobody_waits_passes_nobody():
    made = by_tier((LOW, "low"))
    for _ in range(20):
        made.add(LOW, "low", 1.0)
        made.pop()
    made.add(A, "high", 1.0)
    assert made.pop() == "high"


TIERED = [Party(tenant, tier) for tenant in "ab" for tier in (PREMIUM, STANDARD, BACKGROUND, SYSTEM)]


@given(st.lists(st.lists(st.sampled_from(TIERED), max_size=3), max_size=60))
def test_each_that_waits_has_its_turn(arrivals):
    made, came, taken = TierTurns(DEFAULT_TIERS), [], []
    for parties in arrivals:
        for party in parties:
            made.add(party, len(came), 1.0)
            came.append(party)
        if len(made):
            taken.append(made.pop())
        assert len(made) == len(came) - len(taken)
    assert sorted(taken + order(made)) == list(range(len(came)))
