"""Who of those that wait for memory starts on a decode engine, without an engine."""

import math
from dataclasses import dataclass, field

import pytest

from slo.decode.admission import Chances, Room, guaranteed, starts
from slo.decode.predicted_peak import Holding, Pool
from slo.decode.restore import Parked
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

TOP = DEFAULT_TIERS.top_rank


def newcomer(name, tier=STANDARD, since_s=0.0):
    return Parked(name, tier, since_s, True)


def robbed(name, tier=STANDARD):
    return Parked(name, tier, 0.0, False, preemptions=1)


@dataclass
class Waiters:
    """Every one of them takes 100 tokens and 10 more."""

    sizes: dict = field(default_factory=dict)
    prefixes: dict = field(default_factory=dict)
    swapped: frozenset = frozenset()
    slow: frozenset = frozenset()
    asked: list = field(default_factory=list)

    def holding(self, parked):
        self.asked.append(parked.request_id)
        tokens, remaining = self.sizes.get(parked.request_id, (100, 10))
        return Holding(tokens, remaining, DEFAULT_TIERS.rank(parked.tier), True)

    def prefix_tokens(self, parked):
        return self.prefixes.get(parked.request_id, 0)

    def is_computed_again(self, parked):
        return not parked.is_newcomer and parked.request_id not in self.swapped

    def is_borne(self, parked, starts):
        assert parked not in starts
        return parked.request_id not in self.slow


def room(tokens=1000, free=None, held=(), kept=0.0, **more):
    free = tokens - sum(one.tokens for one in held) if free is None else free
    return Room(Pool(tokens, free), list(held), more.pop("running", ()), kept, kept, 20, **more)


def names(ordered, there, waiters=None, now_s=0.0):
    return [one.request_id for one in starts(ordered, waiters or Waiters(), there, DEFAULT_TIERS, now_s)]


ONE_RUNS = (Holding(100, 10, TOP),)


def test_as_many_start_as_memory_lasts_for_and_nobody_is_asked_about_after_that():
    waiters = Waiters()
    ordered = [newcomer(str(number)) for number in range(20)]
    assert names(ordered, room(held=ONE_RUNS), waiters) == list("0123456")
    assert waiters.asked == [str(number) for number in range(8)]


def test_nobody_passes_one_that_is_held_back_but_the_top_tier_within_what_is_kept():
    ordered = [newcomer("big"), newcomer("small"), newcomer("top", PREMIUM), newcomer("second", PREMIUM)]
    waiters = Waiters({"big": (600, 10)})
    held = (*ONE_RUNS, Holding(400, 10, DEFAULT_TIERS.rank(STANDARD)))
    assert names(ordered, room(held=held, kept=150.0), waiters) == ["top"]
    assert names(ordered, room(held=held, kept=50.0), waiters) == []


def test_one_that_does_not_fit_beside_what_higher_tiers_hold_holds_nobody_back():
    low = [newcomer("as big", BACKGROUND), newcomer("low", BACKGROUND)]
    ordered = [newcomer("big"), newcomer("small"), *low]
    waiters = Waiters({"big": (700, 10), "as big": (700, 10)})
    held = (Holding(300, 10, TOP), Holding(100, 10, DEFAULT_TIERS.rank(STANDARD)))
    assert names(ordered, room(held=held), waiters) == ["small", "low"]
    of_its_own_tier = (Holding(400, 10, DEFAULT_TIERS.rank(STANDARD)),)
    assert names(ordered, room(held=of_its_own_tier), waiters) == []


def test_one_that_has_risen_to_a_tier_waits_for_what_that_holds_and_holds_it_back():
    held = (Holding(100, 10, TOP), Holding(300, 10, DEFAULT_TIERS.rank(STANDARD)))
    risen = newcomer("big", BACKGROUND)._replace(level=DEFAULT_TIERS.rank(STANDARD))
    waiters = Waiters({"big": (700, 10)})
    assert names([risen, newcomer("small")], room(held=held), waiters) == []
    not_risen = [newcomer("big", BACKGROUND), newcomer("low", BACKGROUND)]
    assert names(not_risen, room(held=held), waiters) == ["low"]


def test_others_wait_behind_it_for_some_seconds_after_it_would_have_fitted():
    chances, waiters = Chances(), Waiters({"big": (700, 10)})
    ordered, low = [newcomer("big"), newcomer("small")], Holding(300, 10, 0)

    def at(now_s, top_tokens):
        there = room(held=(low, Holding(top_tokens, 10, TOP)), chances=chances)
        return names(ordered, there, waiters, now_s)

    assert at(1.0, 300) == ["small"]
    assert at(2.0, 100) == []
    assert at(6.5, 300) == []
    assert at(7.5, 300) == ["small"]
    chances.keep([])
    assert at(5.0, 300) == ["small"], "what has left is forgotten"


def test_what_is_kept_for_the_top_tier_is_not_given_to_others():
    assert names([newcomer("one")], room(300, held=ONE_RUNS)) == ["one"]
    assert names([newcomer("one")], room(300, held=ONE_RUNS, kept=150.0)) == []
    assert names([newcomer("one", PREMIUM)], room(300, held=ONE_RUNS, kept=150.0)) == ["one"]


def test_one_that_has_lost_its_memory_waits_until_there_is_room_for_it_to_end():
    held, waiters = (Holding(600, 300, DEFAULT_TIERS.rank(STANDARD)),), Waiters({"a": (200, 300)})
    assert names([robbed("a")], room(held=held), waiters) == []
    assert names([robbed("a")], room(2000, held=held), waiters) == ["a"]


def test_in_half_of_what_is_kept_and_not_held_lower_tiers_start():
    assert names([newcomer("one")], room(300, held=ONE_RUNS, kept=100.0)) == ["one"]
    assert names([newcomer("one")], room(300, held=ONE_RUNS, kept=100.0, unused=1.0)) == []


def test_what_is_kept_for_next_steps_of_lower_tiers_keeps_nobody_waiting():
    held = (Holding(840, 10, DEFAULT_TIERS.rank(BACKGROUND)), Holding(40, 10, DEFAULT_TIERS.rank(STANDARD)))
    ranks = [0, 0, 1]
    assert names([newcomer("one", BACKGROUND)], room(held=held, running=ranks)) == []
    assert names([newcomer("one", STANDARD)], room(held=held, running=ranks)) == ["one"]
    assert names([newcomer("one", STANDARD)], room(held=held, running=[1, 1])) == []
    assert names([newcomer("one", PREMIUM)], room(held=held, running=[1, 1])) == ["one"]


def test_one_at_a_time_computes_again_and_the_next_keeps_its_memory_for_its_turn():
    ordered = [robbed("a"), robbed("b"), newcomer("c")]
    assert names(ordered, room()) == ["a", "c"]
    assert names(ordered, room(restores=True)) == ["c"]
    assert names(ordered, room(), Waiters(swapped=frozenset("a"))) == ["a", "b", "c"]
    assert names(ordered, room(350, held=ONE_RUNS)) == ["a"], "b's turn comes with what c would take"


def test_what_others_hold_of_a_sequence_needs_no_memory():
    there = lambda: room(300, free=60, held=(Holding(240, 10, 1),))  # noqa: E731 - it is given out
    assert names([newcomer("a")], there()) == []
    assert names([newcomer("a")], there(), Waiters(prefixes={"a": 80})) == ["a"]


def test_one_of_the_top_tier_is_within_what_is_kept_with_what_others_do_not_hold_of_its_sequence():
    held = (Holding(840, 10, DEFAULT_TIERS.rank(BACKGROUND)), Holding(100, 10, TOP))
    ordered = [newcomer("a", PREMIUM), newcomer("b", PREMIUM)]

    def there(kept):
        return room(held=held, running=[TOP], kept=kept)  # 60 are free, 20 of them for the next steps

    assert names(ordered, there(60.0)) == []
    assert names(ordered, there(60.0), Waiters(prefixes={"a": 50, "b": 90})) == ["a", "b"]
    assert names(ordered, there(50.0), Waiters(prefixes={"a": 50, "b": 90})) == ["a"]
    assert names(ordered, there(40.0), Waiters(prefixes={"a": 50, "b": 90})) == []


def test_who_slows_the_others_down_holds_back_whoever_comes_after_it():
    ordered = [newcomer("a"), newcomer("b")]
    assert names(ordered, room(held=ONE_RUNS), Waiters(slow=frozenset("a"))) == []
    ordered = [newcomer("a", PREMIUM), newcomer("b"), robbed("c")]
    assert names(ordered, room(held=ONE_RUNS), Waiters(slow=frozenset("b"))) == ["a"]


def test_one_of_the_top_tier_that_waits_for_its_pace_has_its_memory_and_holds_nobody_back():
    ordered, waiters = [newcomer("a", PREMIUM), newcomer("b"), robbed("c")], Waiters(slow=frozenset("a"))
    there = room(held=ONE_RUNS)
    assert names(ordered, there, waiters) == ["b", "c"]
    assert there.is_paced
    assert names(ordered, room(tokens=350, held=ONE_RUNS), waiters) == ["b"], "a's memory is not given away"
    assert names(ordered, room(places=1), waiters) == [], "nor its place"


def test_places_that_are_kept_are_for_the_top_tier():
    ordered = [newcomer("a"), newcomer("b"), newcomer("top", PREMIUM)]
    assert names(ordered, room(places=2, places_kept=1)) == ["a", "top"]
    assert names(ordered, room(places=1, places_kept=1)) == ["top"]
    assert names(ordered, room(places=2)) == ["a", "b"]
    assert names(ordered, room(places=math.inf)) == ["a", "b", "top"]


def test_one_of_the_top_tier_takes_a_place_from_those_below_where_none_is_kept():
    ordered = [newcomer("top", PREMIUM), newcomer("a"), newcomer("b")]
    assert names(ordered, room(places=1)) == ["top"]
    assert names(ordered, room(places=2)) == ["top", "a"]
    assert names(ordered, room(places=2, places_kept=1)) == ["top", "a"], "the place was its own"


@pytest.mark.parametrize(("waited_s", "expected"), [(19.0, []), (21.0, ["one"])])
def test_one_that_would_never_fit_starts_at_last_beside_tiers_above_it(waited_s, expected):
    waiters = Waiters({"one": (500, 480)})
    found = names([newcomer("one", BACKGROUND)], room(held=ONE_RUNS), waiters, now_s=waited_s)
    assert found == expected


def test_the_top_tiers_newcomers_are_guaranteed_what_is_kept_as_far_as_lower_tiers_make_room():
    needs = [("a", 3), ("b", 4), ("c", 1)]
    assert [one.request_id for one in guaranteed(needs, TOP, 8, 100)] == ["a", "b", "c"]
    assert [one.request_id for one in guaranteed(needs, TOP, 6.5, 100)] == ["a"]
    assert [one.request_id for one in guaranteed(needs, TOP, 8, 7)] == ["a", "b"]
    (one,) = guaranteed(needs[:1], TOP, 8, 7)
    assert (one.rank, one.blocks, one.next_blocks) == (TOP, 0, 3)
