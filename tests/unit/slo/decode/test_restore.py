"""Who gets onto the engine first."""

from hypothesis import given
from hypothesis import strategies as st

from slo.decode.predicted_peak import Holding
from slo.decode.restore import Parked, restore_order
from slo.queue.ageing import Ageing
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

NOW_S = 1000.0
PARKED = st.lists(
    st.builds(
        Parked,
        st.uuids().map(str),
        st.sampled_from(DEFAULT_TIERS.names),
        st.floats(900, 1000),
        st.booleans(),
        st.integers(0, 3),
        st.floats(-5, 5),
        st.integers(1, 100),
        ahead_s=st.floats(0, 100),
    ),
    max_size=12,
)


POOL_TOKENS = 1000


def order(*parked, held=()):
    ordered = restore_order(parked, DEFAULT_TIERS, Ageing(), NOW_S, held, POOL_TOKENS)
    return [one.request_id for one in ordered]


def holding(tier, tokens):
    return Holding(tokens, 0, DEFAULT_TIERS.rank(tier))


@given(PARKED)
def test_each_stands_once_and_of_one_tier_newcomers_stand_last_and_by_arrival(parked):
    ordered = restore_order(parked, DEFAULT_TIERS, Ageing(per_s=0.0), NOW_S, (), POOL_TOKENS)
    assert {one.request_id for one in ordered} == {one.request_id for one in parked}
    assert len(ordered) == len(parked)
    for tier in DEFAULT_TIERS.names:
        fresh = [one for one in ordered if one.tier == tier and one.preemptions == 0]
        assert [one.is_newcomer for one in fresh] == sorted(one.is_newcomer for one in fresh)
        arrivals = [one.since_s - one.ahead_s for one in fresh if one.is_newcomer]
        assert arrivals == sorted(arrivals)


@given(PARKED)
def test_nobody_passes_the_top_tier_however_often_its_memory_was_taken(parked):
    ordered = restore_order(parked, DEFAULT_TIERS, Ageing(), NOW_S, (), POOL_TOKENS)
    ranks = [one.tier == PREMIUM for one in ordered]
    assert ranks == sorted(ranks, reverse=True)


def test_who_has_risen_says_to_which_rank():
    parked = [Parked("old", BACKGROUND, NOW_S - 25.0, True), Parked("new", BACKGROUND, NOW_S, True)]
    ordered = restore_order(parked, DEFAULT_TIERS, Ageing(), NOW_S, (), POOL_TOKENS)
    assert [(one.request_id, one.level) for one in ordered] == [("old", 1), ("new", 0)]


def test_by_credit_then_by_size():
    late = Parked("late", STANDARD, 999.0, False, credit_s=-1.0, tokens=50)
    small = Parked("small", STANDARD, 999.0, False, tokens=10)
    large = Parked("large", STANDARD, 999.0, False, tokens=20)
    assert order(large, small, late) == ["late", "small", "large"]


def test_before_newcomers_of_its_tier_and_after_those_of_a_higher_one():
    taken = Parked("taken", STANDARD, 999.0, False)
    same, lower = Parked("same", STANDARD, 998.0, True), Parked("lower", BACKGROUND, 998.0, True)
    higher = Parked("higher", PREMIUM, 999.0, True)
    assert order(same, lower, higher, taken) == ["higher", "taken", "same", "lower"]


def test_waiting_raises_a_request_and_so_does_being_preempted_twice():
    old, new = Parked("old", BACKGROUND, 970.0, False), Parked("new", STANDARD, 999.0, True)
    assert order(new, old) == ["old", "new"]
    twice = Parked("twice", BACKGROUND, 999.0, False, preemptions=2)
    assert order(new, twice) == ["twice", "new"]


def test_an_earlier_place_counts_within_a_tier_and_is_no_wait():
    step = Parked("step", BACKGROUND, 999.0, True, ahead_s=60.0)
    older, higher = Parked("older", BACKGROUND, 990.0, True), Parked("higher", STANDARD, 999.0, True)
    assert order(older, step, higher) == ["higher", "step", "older"]


OLD = [Parked(f"old{place}", BACKGROUND, 940.0 + place, True, tokens=60) for place in range(4)]
NEW = Parked("new", STANDARD, 999.0, True, tokens=10)


def test_a_tier_rises_only_to_a_tenth_of_the_memory_and_its_oldest_first():
    assert order(NEW, *OLD) == ["old0", "old1", "new", "old2", "old3"]
    assert order(NEW, *OLD, held=[holding(BACKGROUND, 50)]) == ["old0", "new", "old1", "old2", "old3"]
    assert order(NEW, *OLD, held=[holding(STANDARD, 900)]) == ["old0", "old1", "new", "old2", "old3"]


def test_a_tier_that_has_a_tenth_of_the_memory_does_not_rise():
    held = [holding(BACKGROUND, 40), holding(BACKGROUND, 60)]
    assert order(NEW, *OLD, held=held) == ["new", "old0", "old1", "old2", "old3"]
    twice = Parked("twice", BACKGROUND, 999.0, False, preemptions=2)
    assert order(NEW, twice, held=held) == ["new", "twice"]


def test_within_its_tier_one_that_has_waited_for_long_stays_before_the_smaller_ones():
    held = [holding(BACKGROUND, 100)]
    old = Parked("old", BACKGROUND, 970.0, False, tokens=90)
    small = Parked("small", BACKGROUND, 999.0, False, tokens=10)
    assert order(small, old, NEW, held=held) == ["new", "old", "small"]
