"""What a set of tiers may hold, and what it answers."""

import pickle
from dataclasses import replace

import pytest
from own_tiers import FILE, FOUR, IMAGE, ONE, SEARCH, SEVEN, TEXT

from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM, Tier, TierPolicy, TierSet

PLAIN = TierPolicy(None, None, sheddable=True, weight=1.0)


def plain(*names, **settings):
    return {Tier(name): replace(PLAIN, **settings) for name in names}


def test_ranks_follow_the_order_and_the_first_is_the_top():
    assert [FOUR.rank(tier) for tier in (TEXT, IMAGE, SEARCH, FILE)] == [3, 2, 1, 0]
    assert (FOUR.top, FOUR.lowest, FOUR.top_rank) == (TEXT, FILE, 3)
    assert [DEFAULT_TIERS.rank(tier) for tier in (PREMIUM, STANDARD, BACKGROUND)] == [2, 1, 0]
    assert (ONE.top, ONE.lowest, ONE.top_rank) == (TEXT, TEXT, 0)


def test_the_servers_own_tier_has_the_lowest_rank_and_weight():
    for tiers in (DEFAULT_TIERS, FOUR, SEVEN, ONE):
        assert tiers.rank(SYSTEM) == tiers.rank(tiers.lowest) == 0
        assert tiers[SYSTEM].weight == min(policy.weight for policy in tiers.clients.values())
        assert not tiers[SYSTEM].sheddable
        assert SYSTEM not in tiers.names
        assert [*tiers] == [*tiers.names, SYSTEM]


def test_a_name_that_is_not_known_ranks_lowest():
    assert FOUR.rank(PREMIUM) == 0


def test_who_may_be_shed_comes_from_the_lowest_up_and_the_top_never():
    assert FOUR.sheddable == (FILE, SEARCH, IMAGE)
    assert SEVEN.sheddable == ("class-7", "class-5", "class-4", "class-3", "class-2")
    assert ONE.sheddable == ()


def test_service_tiers_name_tiers():
    assert FOUR.service_tiers() == {
        "auto": SEARCH,
        "default": SEARCH,
        "priority": TEXT,
        "flex": FILE,
        "batch": FILE,
    }


@pytest.mark.parametrize(
    ("clients", "default", "problem"),
    [
        ({}, "a", "1 to 8 tiers, not 0"),
        (plain(*"abcdefghi"), "a", "1 to 8 tiers, not 9"),
        (plain("Gold"), "Gold", "'Gold' is not a tier's name"),
        (plain("a b"), "a b", "is not a tier's name"),
        (plain("a" * 33), "a" * 33, "is not a tier's name"),
        (plain("1st"), "1st", "is not a tier's name"),
        (plain("system"), "system", "the server uses the name itself"),
        (plain("none"), "none", "the server uses the name itself"),
        (plain("a", "b"), "c", "the default tier 'c' is none of a, b"),
        (plain("a", "b", share=0.6), "a", "at most 1, not 1.2"),
        (plain("a", "b", service_tiers=("flex",)), "a", "'flex' asks for both 'a' and 'b'"),
        (plain("a", service_tiers=("auto",)), "a", "'auto' always asks for the default tier, not for 'a'"),
    ],
)
def test_what_is_no_set_of_tiers_is_refused_with_the_reason(clients, default, problem):
    with pytest.raises(ValueError, match="tier") as caught:
        TierSet(clients, Tier(default))
    assert problem in str(caught.value)


@pytest.mark.parametrize("settings", [{"target": 1.0}, {"target": 0.0}, {"weight": 0.0}, {"share": 1.1}])
def test_numbers_of_a_tier_have_ranges(settings):
    with pytest.raises(ValueError, match=f"a tier's {next(iter(settings))}"):
        replace(PLAIN, **settings)


def test_a_set_is_the_same_elsewhere_and_another_one_in_another_order():
    assert pickle.loads(pickle.dumps(FOUR)) == FOUR
    turned = TierSet(dict(reversed(FOUR.clients.items())), FOUR.default)
    assert turned != FOUR
    assert turned.top == FILE


def test_a_set_with_other_policies_keeps_its_order():
    cheaper = FOUR.revised({IMAGE: replace(FOUR[IMAGE], weight=3.0)})
    assert cheaper.names == FOUR.names
    assert cheaper[IMAGE].weight == 3.0
    assert FOUR[IMAGE].weight == 4.0
    with pytest.raises(KeyError):
        FOUR.revised({PREMIUM: PLAIN})
