"""Who is worth more or has waited goes in first, and nobody waits for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.queue.entrance import Entrance
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM, Tier


def order(*came, now_s):
    """In which order they go in, all at `now_s`, that came as (name, tier, second)."""
    door = Entrance(DEFAULT_TIERS)
    for name, tier, at_s in came:
        door.add(tier, name, at_s)
    taken = "".join(iter(lambda: door.pop(now_s), None))
    assert door.pop(now_s) is None
    return taken


@pytest.mark.parametrize(
    ("came", "taken"),
    [
        ([("a", BACKGROUND, 0.0), ("b", BACKGROUND, 1.0), ("p", PREMIUM, 2.0)], "pab"),
        ([("a", BACKGROUND, 0.0), ("s", STANDARD, 19.0)], "sa"),
        ([("a", BACKGROUND, 0.0), ("b", BACKGROUND, 2.0), ("s", STANDARD, 21.0)], "asb"),
        ([("a", BACKGROUND, 0.0), ("q", PREMIUM, 300.0), ("p", PREMIUM, 299.0)], "qpa"),
        ([("u", Tier("unknown"), 1.0), ("a", BACKGROUND, 2.0), ("s", STANDARD, 3.0)], "sua"),
    ],
)
def test_who_is_worth_more_or_has_waited_goes_in_first_and_premium_before_all(came, taken):
    assert order(*came, now_s=max(at_s for *_, at_s in came)) == taken


def test_while_premium_comes_without_end_one_in_eight_goes_to_who_has_waited_longest():
    door = Entrance(DEFAULT_TIERS)
    for number, tier in enumerate((BACKGROUND, STANDARD, SYSTEM, BACKGROUND)):
        door.add(tier, number, float(number))
    taken = []
    for at_s in range(10, 50):
        door.add(PREMIUM, None, float(at_s))
        taken.append(door.pop(float(at_s)))
    assert {place: number for place, number in enumerate(taken, start=1) if number is not None} == {
        8: 0,
        16: 1,
        24: 2,
        32: 3,
    }


@given(st.lists(st.lists(st.sampled_from([PREMIUM, STANDARD, BACKGROUND, SYSTEM]), max_size=4), max_size=60))
def test_nobody_waits_for_more_than_eight_places_for_each_that_came_before_it(arrivals):
    door, came, waiting = Entrance(DEFAULT_TIERS), 0, dict[int, int]()
    for tiers in [*arrivals, *[[PREMIUM]] * 60]:
        for tier in tiers:
            door.add(tier, came, float(came))
            waiting[came] = 8 * (len(waiting) + 1)
            came += 1
        waiting.pop(door.pop(float(came)), None)
        waiting = {number: places - 1 for number, places in waiting.items()}
        assert all(places > 0 for places in waiting.values())


def test_who_has_left_does_not_go_in():
    door = Entrance(DEFAULT_TIERS)
    items = [object() for _ in range(3)]
    for item in items:
        door.add(STANDARD, item, 0.0)
    door.remove(STANDARD, items[1])
    door.remove(STANDARD, items[1])
    door.remove(PREMIUM, items[0])
    assert [door.pop(1.0) for _ in range(3)] == [items[0], items[2], None]
