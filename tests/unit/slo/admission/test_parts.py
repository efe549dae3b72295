"""Who may lengthen a queue that is full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.admission.parts import excess

WEIGHTS = {"heavy": 3.0, "a": 1.0, "b": 1.0}


@pytest.mark.parametrize(
    ("held", "asker", "over"),
    [
        ({}, "a", -10.0),
        ({"a": 10.0}, "a", 0.0),  # it is not beyond it
        ({"a": 12.0}, "a", 2.0),
        ({"a": 12.0}, "b", -5.0),  # up to the limit
        ({"a": 19.0, "b": 1.5}, "b", 0.5),  # beyond the limit nobody may
        ({"a": 6.0, "b": 6.0}, "b", 1.0),  # until it has its part
        ({"a": 9.0, "b": 6.0}, "b", 1.0),
        ({"a": 3.0, "heavy": 7.5}, "heavy", 0.0),
        ({"a": 3.0, "heavy": 7.5}, "a", 0.5),
        ({"a": 10.0, "b": 15.0}, "a", 5.0),  # its part, and then the limit
    ],
)
def test_who_has_their_part_waits_and_who_has_less_does_not(held, asker, over):
    assert excess(held, asker, 10.0, 20.0, WEIGHTS.__getitem__) == pytest.approx(over)


@given(
    held=st.dictionaries(st.sampled_from("abcd"), st.floats(0.0, 50.0)),
    most=st.floats(0.1, 50.0),
    asker=st.sampled_from("abcde"),
)
def test_what_it_says_has_to_be_done_is_enough(held, most, asker):
    over = excess(held, asker, most, 2 * most)
    if over <= 0:
        return
    # All of it is done of what the asker has, or of the others where it has too little.
    mine = min(over, held.get(asker, 0.0))
    left = held | ({asker: held[asker] - mine} if asker in held else {})
    for name in left:
        if name != asker:
            done = min(over - mine, left[name])
            left[name] -= done
            mine += done
    assert excess(left, asker, most, 2 * most) <= 1e-6
