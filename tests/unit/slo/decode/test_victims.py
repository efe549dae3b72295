"""Whose memory is taken: only whose may be, no more than needed, the cheapest per block first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.decode.victims import (
    IMMUNE_AFTER,
    STABLE_TOKENS,
    HostRoom,
    Stream,
    TakenBy,
    Victim,
    VictimReason,
    VictimRules,
)

TOP = 2
RULES = VictimRules(top_rank=TOP, token_s=0.001, step_s=0.05, chunk_tokens=128)
OLD = STABLE_TOKENS + 100


def with_room(host):
    return replace(RULES, host=host)


def stream(  # noqa: PLR0913 - most have a default
    name, rank=0, blocks=10, tokens=160, *, next_blocks=0, more=1, since=OLD, preempted=0, credit=0.0
):
    return Stream(name, rank, 2.0**rank, tokens, blocks, next_blocks, more, since, preempted, credit)


@st.composite
def some_streams(draw):
    number = draw(st.integers(1, 9))
    return [
        stream(
            f"r{index}",
            draw(st.integers(0, TOP)),
            draw(st.integers(0, 20)),
            draw(st.integers(1, 4000)),
            next_blocks=(needed := draw(st.integers(0, 1))),
            more=needed + (rest := draw(st.integers(0, 2))) + draw(st.integers(0, 2)),
            since=draw(st.integers(0, 60)),
            preempted=draw(st.integers(0, 3)),
            credit=draw(st.sampled_from([0.0, 0.5, 30.0, float("inf")])),
        )._replace(may_drop=draw(st.booleans()), rest_blocks=rest)
        for index in range(number)
    ]


def names(victims):
    return [victim.request_id for victim in victims]


@given(some_streams(), st.integers(0, 8))
def test_the_rules_hold_for_any_streams(streams, free):
    victims = RULES.choose(streams, free)
    by_name = {one.request_id: one for one in streams}
    gone = [by_name[name] for name in names(victims)]
    assert len(set(names(victims))) == len(victims)
    assert len(gone) < len(streams), "somebody progresses"
    needed = sum(one.room_blocks for one in streams)
    if needed <= free:
        assert not victims
        return
    top_need = max(RULES.level(one) for one in streams if one.room_blocks)
    assert all(RULES.level(one) <= top_need for one in gone), "nobody yields to a lower tier"
    for one, victim in zip(gone, victims, strict=True):
        if victim.reason is VictimReason.COST:
            assert one.since_start >= STABLE_TOKENS
            assert one.preemptions < IMMUNE_AFTER
            assert RULES.level(one) < TOP
    kept = [one for one in streams if one not in gone]
    freed = free + sum(one.blocks for one in gone)
    is_enough = sum(one.room_blocks for one in kept) <= freed
    could_still = [one for one in kept if one.blocks and RULES.level(one) <= top_need]
    assert is_enough or len(could_still) <= 1, "only one that has to progress may be left"


@given(some_streams(), st.integers(0, 8))
def test_only_who_may_be_is_dropped_at_its_limit_and_for_higher_tiers(streams, free):
    by_name = {one.request_id: one for one in streams}
    freed, gone = free, set()
    for victim in RULES.choose(streams, free):
        one = by_name[victim.request_id]
        if victim.by is TakenBy.DROP:
            assert one.may_drop
            assert one.preemptions >= IMMUNE_AFTER
            above = [each for each in streams if each.rank > one.rank and each.request_id not in gone]
            assert sum(each.next_blocks for each in above) > freed, "those before it free too little"
        freed, gone = freed + one.blocks, gone | {one.request_id}


@given(some_streams(), st.integers(0, 8))
def test_nobody_is_dropped_where_no_higher_tier_needs_memory(streams, free):
    needy = [one._replace(may_drop=True, next_blocks=0 if one.rank else one.next_blocks) for one in streams]
    assert all(victim.by is not TakenBy.DROP for victim in RULES.choose(needy, free))


@given(some_streams(), st.integers(0, 8))
def test_nobody_yields_in_vain(streams, free):
    """Without any one of the victims, less than the next twenty steps need would be free."""
    victims = RULES.choose(streams, free)
    gone = set(names(victims))
    for spared in gone:
        out = [one for one in streams if one.request_id in gone - {spared}]
        rest = [one for one in streams if one not in out]
        assert sum(one.more_blocks for one in rest) > free + sum(one.blocks for one in out)


def test_the_cheapest_per_block_goes():
    streams = [
        stream("needs", next_blocks=1, tokens=9999),
        stream("small", blocks=2, tokens=32, more=0),
        stream("shares", blocks=2, tokens=1600, more=0),
        stream("large", blocks=100, tokens=4000, more=0),
    ]
    assert names(RULES.choose(streams, 0)) == ["small"]


def test_who_is_ahead_of_its_objective_can_be_away():
    late, ahead = stream("late"), stream("ahead", credit=60.0)
    keeper = stream("keeper", tokens=9999, next_blocks=1)
    assert names(RULES.choose([late, ahead, keeper], 0)) == ["ahead"]


def test_a_lower_tier_yields_first_and_never_the_other_way_round():
    low, middle = stream("low", blocks=3, tokens=4000), stream("middle", rank=1)
    needs = stream("needs", rank=1, next_blocks=1, more=1)
    assert RULES.cost(low, 4.0) / low.blocks > RULES.cost(middle, 3.0) / middle.blocks
    assert names(RULES.choose([low, middle, needs], 0)) == ["low"], "however dear it is"
    too_little = low._replace(blocks=1)
    assert names(RULES.choose([too_little, middle, needs], 0)) == ["middle"], "nobody yields in vain"
    needs_low = stream("needs", next_blocks=1, more=1, tokens=9999)
    assert names(RULES.choose([low, middle, needs_low], 0)) != ["middle"]


def test_the_top_tier_yields_to_itself_alone_and_last():
    top, needs = stream("top", rank=TOP), stream("needs", rank=TOP, next_blocks=1, tokens=9999)
    dear = stream("dear", rank=1, blocks=1, tokens=4000, preempted=1)
    assert names(RULES.choose([top, needs, dear], 0)) == ["dear"]
    assert RULES.choose([top, needs], 0) == [Victim("top", VictimReason.TOP_TIER)]


@pytest.mark.parametrize(
    ("spared", "reason"),
    [
        ({"since": STABLE_TOKENS - 1}, VictimReason.UNSTABLE),
        ({"preempted": IMMUNE_AFTER}, VictimReason.IMMUNE),
    ],
)
def test_who_is_spared_goes_only_when_nobody_else_is_left(spared, reason):
    needs = stream("needs", rank=TOP, next_blocks=1, tokens=9999)
    protected, dear = stream("protected", **spared), stream("dear", tokens=5000, blocks=1)
    assert RULES.choose([needs, protected, dear], 0) == [Victim("dear", VictimReason.COST)]
    assert RULES.choose([needs, protected], 0) == [Victim("protected", reason)]


def test_memory_is_freed_for_twenty_steps_at_once():
    streams = [stream(f"r{index}", blocks=2, more=2, next_blocks=int(index == 0)) for index in range(6)]
    assert RULES.choose(streams, 1) == []
    assert len(RULES.choose(streams, 0)) == 3, (
        "12 blocks are needed soon, each victim gives 2 and needs 2 less"
    )


def test_somebody_alone_is_left_alone():
    assert RULES.choose([stream("alone", next_blocks=3, more=3)], 0) == []


def test_somebody_alone_makes_way_for_a_higher_tier_that_starts_with_what_it_has():
    alone = stream("alone", blocks=97, next_blocks=1)
    newcomer = stream("newcomer", TOP, blocks=0, next_blocks=4, more=4)
    assert names(RULES.choose([alone, newcomer], 3)) == ["alone"]
    assert RULES.choose([alone, newcomer._replace(rank=0)], 3) == [], "not for its own tier"
    assert RULES.choose([alone, newcomer._replace(next_blocks=101)], 3) == [], "nobody would progress"
    assert names(RULES.choose([alone, newcomer, stream("other", blocks=9, tokens=100)], 0)) == ["other"]


def test_kv_waits_in_host_memory_where_that_costs_less():
    fast = with_room(HostRoom(free_blocks=100, block_s=0.001, block_tokens=16))
    slow = with_room(HostRoom(free_blocks=100, block_s=0.02, block_tokens=16))
    one = stream("a")
    assert fast.taken_by(one, 3.0) is TakenBy.SWAP
    assert slow.taken_by(one, 3.0) is TakenBy.RECOMPUTE, "0.4 s there and back, 0.16 s to compute"
    assert RULES.taken_by(one, 3.0) is TakenBy.RECOMPUTE
    assert fast.cost(one, 3.0) < RULES.cost(one, 3.0) == slow.cost(one, 3.0)


def test_the_prefill_tier_computes_it_where_the_others_would_wait_for_longer():
    rules = replace(RULES, leaves_for=4.0)
    leaves = stream("a", tokens=1600)._replace(may_leave=True)
    assert rules.taken_by(leaves, 8.0) is TakenBy.REPREFILL
    assert rules.taken_by(leaves, 0.5) is TakenBy.RECOMPUTE, "hardly anybody waits"
    assert rules.taken_by(stream("a", tokens=1600), 8.0) is TakenBy.RECOMPUTE
    assert replace(rules, host=HostRoom(200, 0.0001, 16)).taken_by(leaves, 8.0) is TakenBy.SWAP


def test_host_memory_goes_to_the_first_of_several_victims_that_it_has_room_for():
    rules = with_room(HostRoom(free_blocks=15, block_s=0.0001, block_tokens=16))
    streams = [stream(name, next_blocks=1) for name in "abcd"] + [stream("top", TOP, next_blocks=30, more=30)]
    victims = rules.choose(streams, 0)
    assert [victim.by for victim in victims] == [TakenBy.SWAP] + [TakenBy.RECOMPUTE] * (len(victims) - 1)
    assert len(victims) > 1
    assert rules.taken_by(stream("large", tokens=16 * 16), 1.0) is TakenBy.RECOMPUTE


def may_drop(name, **given):
    return stream(name, **{"preempted": IMMUNE_AFTER, **given})._replace(may_drop=True)


@pytest.mark.parametrize(
    ("victim", "needs", "expected"),
    [
        pytest.param(may_drop("a"), {"rank": TOP}, TakenBy.DROP, id="for the top tier"),
        pytest.param(may_drop("a"), {"rank": 1}, TakenBy.DROP, id="for the one above"),
        pytest.param(may_drop("a"), {"preempted": IMMUNE_AFTER}, TakenBy.RECOMPUTE, id="not for its own"),
        pytest.param(may_drop("a", preempted=1), {"rank": TOP}, TakenBy.RECOMPUTE, id="not before its limit"),
        pytest.param(
            stream("a", preempted=IMMUNE_AFTER), {"rank": TOP}, TakenBy.RECOMPUTE, id="not if it may not be"
        ),
    ],
)
def test_who_was_chosen_as_often_as_anybody_may_be_is_dropped_for_a_higher_tier(victim, needs, expected):
    newcomer = stream("newcomer", blocks=0, next_blocks=1, **needs)
    (found,) = RULES.choose([victim, newcomer, stream("keeper", TOP)], 0)
    assert (found.request_id, found.by) == ("a", expected)


def test_one_at_its_limit_is_not_the_one_that_must_progress_while_a_higher_tier_needs_memory():
    needs = stream("needs", 1, next_blocks=1)
    assert RULES.choose([may_drop("a"), needs], 0) == [Victim("a", VictimReason.IMMUNE, TakenBy.DROP)]
    assert names(RULES.choose([stream("a", preempted=IMMUNE_AFTER), needs], 0)) == ["needs"]
    assert RULES.choose([may_drop("alone"), needs._replace(blocks=0)], 0) == [], "nobody else would progress"


def test_nobody_is_dropped_while_somebody_else_is_left():
    needs = stream("needs", TOP, next_blocks=1, tokens=9999)
    fresh = stream("fresh", since=0, blocks=1, more=0)
    assert RULES.choose([needs, may_drop("old"), fresh], 0) == [Victim("fresh", VictimReason.UNSTABLE)]


def test_nobody_is_dropped_for_what_the_higher_tier_has_already():
    """The top tier has its block; it is the low ones that are short of theirs."""
    low = [may_drop(name, next_blocks=1, tokens=tokens) for name, tokens in (("a", 100), ("b", 200))]
    victims = RULES.choose([stream("top", TOP, next_blocks=1, tokens=9999), *low], 1)
    assert victims
    assert {victim.by for victim in victims} == {TakenBy.RECOMPUTE}


def test_nobody_is_dropped_for_room_that_the_next_step_does_not_need():
    prompt = stream("prompt", TOP, next_blocks=1, more=50)._replace(rest_blocks=49)
    newcomer = stream("newcomer", TOP, blocks=0, next_blocks=8, more=8)
    low = may_drop("low")
    for free, by in [(50, TakenBy.RECOMPUTE), (9, TakenBy.RECOMPUTE), (8, TakenBy.DROP)]:
        assert RULES.choose([prompt, newcomer, low], free) == [Victim("low", VictimReason.IMMUNE, by)]


def test_of_two_tiers_the_lower_one_does_not_count_as_the_top_one_when_it_may_be_dropped():
    rules = replace(RULES, top_rank=1)
    needs, peer = stream("needs", 1, next_blocks=1, tokens=9999), stream("peer", 1)
    dear = may_drop("dear", tokens=8000)
    assert rules.choose([needs, peer, dear], 0) == [Victim("dear", VictimReason.IMMUNE, TakenBy.DROP)]
