"""Turns are fair by work between tenants, and between the tiers of one."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.queue.turns import FairTurns
from slo.request import Party
from slo.tiers import BACKGROUND, PREMIUM

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
