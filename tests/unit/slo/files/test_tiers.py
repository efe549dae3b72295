"""The section `tiers` of a file: which set it stands for."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from slo.files.tiers import TierSection, tier_set
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD


def tiers(**sections):
    return tier_set({name: TierSection.model_validate(section) for name, section in sections.items()})


def test_nothing_is_the_default_set():
    assert tiers() == DEFAULT_TIERS


def test_a_default_tier_keeps_what_is_not_given_whatever_the_order_in_the_file():
    found = tiers(background={"weight": 3, "tpot_ms": 90}, premium={"tpot_ms": None})
    assert found.names == DEFAULT_TIERS.names
    assert found[BACKGROUND] == replace(DEFAULT_TIERS[BACKGROUND], weight=3.0, tpot_s=0.09)
    assert found[PREMIUM] == replace(DEFAULT_TIERS[PREMIUM], tpot_s=None)
    assert found[STANDARD] == DEFAULT_TIERS[STANDARD]
    assert tiers(background={"default": True}).default == BACKGROUND


def test_another_name_makes_it_a_set_of_its_own():
    found = tiers(premium={"weight": 5}, batch={"default": True, "sheddable": False, "share": 0.2})
    assert found.names == ("premium", "batch")
    assert (found[PREMIUM].weight, found[PREMIUM].tpot_s, found[PREMIUM].sheddable) == (5, None, True)
    assert (found["batch"].weight, found["batch"].share, found["batch"].sheddable) == (1.0, 0.2, False)
    assert found.default == "batch"


def test_ranks_go_before_the_order_in_the_file():
    found = tiers(low={"rank": -1, "default": True}, high={"rank": 20}, middle={"rank": 3})
    assert found.names == ("high", "middle", "low")


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"premum": {}}, "there is no tier 'premum'; did you mean 'premium'?"),
        ({"gold": {}}, "known are premium, standard, background (tiers of your own: mark"),
        ({"a": {"default": True}, "b": {"default": True}}, "one tier is the default, not a and b"),
        ({"a": {"default": True, "rank": 1}, "b": {}}, "tier 'b' has no rank"),
        ({"premium": {"rank": 1}}, "tier 'standard' has no rank"),
        ({"a": {"default": True, "rank": 1}, "b": {"rank": 1}}, "two tiers have the same rank"),
        ({"a": {"default": True, "share": 0.8}, "b": {"share": 0.7}}, "at most 1, not 1.5"),
        ({name: {"default": name == "a"} for name in "abcdefghi"}, "1 to 8 tiers, not 9"),
    ],
)
def test_what_is_unclear_is_refused_with_what_would_be_right(sections, problem):
    with pytest.raises(ValueError, match="tier") as caught:
        tiers(**sections)
    assert problem in str(caught.value)


def test_an_unknown_setting_is_refused_with_the_nearest():
    with pytest.raises(ValidationError, match="did you mean 'weight'"):
        tiers(premium={"wight": 2})
