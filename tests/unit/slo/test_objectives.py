"""Each spelling of an objective is read, what is wrong is refused by name, and caps hold."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_tiers import FILE, FOUR, SEVEN, TEXT

from slo.errors import FieldError
from slo.objectives import (
    MAX_OBJECTIVE_MS,
    MIN_OBJECTIVE_MS,
    OBJECTIVE_HEADERS,
    VALID_OBJECTIVE,
    Alone,
    Objective,
    parse_objective_ms,
    resolve,
)
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, TierPolicy


def objective(*headers, service_tier=None, highest=PREMIUM, tiers=DEFAULT_TIERS):
    return resolve(headers, service_tier, tiers, highest)


def refusal(*headers, service_tier=None, tiers=DEFAULT_TIERS):
    with pytest.raises(FieldError) as caught:
        objective(*headers, service_tier=service_tier, highest=None, tiers=tiers)
    return caught.value


@pytest.mark.parametrize(
    ("service_tier", "tier"),
    [
        (None, STANDARD),
        ("auto", STANDARD),
        ("default", STANDARD),
        ("priority", PREMIUM),
        ("flex", BACKGROUND),
    ],
)
def test_service_tier_chooses_the_tier_and_its_objectives(service_tier, tier):
    got = objective(service_tier=service_tier)
    assert got.tier == tier
    assert got.ttft_s == DEFAULT_TIERS[tier].ttft_s
    assert got.tpot_s == DEFAULT_TIERS[tier].tpot_s


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-flowprefill-slo-ms"])
def test_each_spelling_of_the_ttft_objective(name):
    assert objective((name, "250")).ttft_s == 0.25


@pytest.mark.parametrize("name", ["x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"])
def test_each_spelling_of_the_tpot_objective(name):
    assert objective((name, "12.5")).tpot_s == 0.0125


def test_the_end_to_end_objective_of_a_request_and_of_its_tier():
    assert objective().e2e_s is None
    assert objective(("x-slo-e2e-ms", "15000")).e2e_s == 15.0
    slow = DEFAULT_TIERS.revised({STANDARD: replace(DEFAULT_TIERS[STANDARD], e2e_s=60.0)})
    assert objective(tiers=slow).e2e_s == 60.0
    assert objective(("x-slo-e2e-ms", "15000"), tiers=slow).e2e_s == 15.0


@pytest.mark.parametrize(
    ("asked", "rest_s", "budget_s"),
    {
        "nothing is due": (Objective(STANDARD, None, None), 3.0, None),
        "only the first token": (Objective(STANDARD, 0.5, None), 3.0, 0.5),
        "the rest leaves enough": (Objective(STANDARD, 0.5, None, e2e_s=5.0), 3.0, 0.5),
        "the rest leaves less": (Objective(STANDARD, 0.5, None, e2e_s=3.2), 3.0, 0.32),
        "only the end": (Objective(STANDARD, None, None, e2e_s=5.0), 3.0, 2.0),
        "the rest is guessed to take longer than all": (Objective(STANDARD, None, None, e2e_s=5.0), 9.0, 0.5),
        "a scaled first token": (Objective(STANDARD, None, None, 2.0, e2e_s=5.0), 3.0, 1.4),
        "a scaled one that the end does not allow": (
            Objective(STANDARD, None, None, 4.0, e2e_s=5.0),
            3.0,
            2.0,
        ),
    }.values(),
)
def test_the_first_token_is_due_early_enough_for_the_rest(asked, rest_s, budget_s):
    assert asked.ttft_budget_s(0.7, rest_s) == (None if budget_s is None else pytest.approx(budget_s))


def test_tier_header_and_a_deadline_for_background():
    got = objective(("x-slo-tier", "background"), ("x-slo-ttft-ms", "900"))
    assert (got.tier, got.ttft_s) == (BACKGROUND, 0.9)


def test_the_servers_own_tier_cannot_be_asked_for():
    error, unknown = refusal(("x-slo-tier", "system")), refusal(("x-slo-tier", "gold"))
    assert (error.field, error.valid) == (unknown.field, unknown.valid)
    assert "is not a tier" in error.problem
    assert "system" not in error.valid
    with pytest.raises(FieldError):
        objective(service_tier="system")


def test_a_scaled_objective_follows_the_predicted_prefill():
    tiers = DEFAULT_TIERS.revised({STANDARD: TierPolicy(None, None, True, 1.0, ttft_scale=1.3)})
    assert objective(tiers=tiers).ttft_budget_s(2.0) == pytest.approx(2.6)
    assert objective(("x-slo-ttft-ms", "100"), tiers=tiers).ttft_budget_s(2.0) == 0.1


def test_a_tenants_cap_lowers_the_tier_and_says_so():
    got = objective(("x-slo-tier", "premium"), highest=STANDARD)
    assert (got.tier, got.clamped_from) == (STANDARD, PREMIUM)
    assert got.ttft_s == DEFAULT_TIERS[STANDARD].ttft_s
    assert objective(highest=STANDARD).clamped_from is None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("abc", "is not a number"),
        ("", "is empty"),
        ("-5", "is negative"),
        ("0", "zero cannot be met"),
        ("0.0", "zero cannot be met"),
        ("NaN", "NaN is not an objective"),
        ("inf", "an infinite objective"),
        ("-Infinity", "an infinite objective"),
        ("1e999", "overflows"),
        ("3600001", "is out of range"),
        ("1e-9", "is out of range"),
        ("100, 200", "is not a number"),
        ("1_000", "is not a number"),
        ("0x10", "is not a number"),
        ("٣", "is not a number"),
    ],
)
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-flowprefill-slo-ms"])
def test_bad_numbers_are_refused_with_field_and_range(name, value, problem):
    error = refusal((name, value))
    assert error.field == name
    assert problem in error.problem
    assert error.valid == VALID_OBJECTIVE


def test_repeated_and_contradictory_objectives_are_refused():
    assert refusal(("x-slo-ttft-ms", "1"), ("x-slo-ttft-ms", "1")).problem == "is given more than once"
    twice = refusal(("x-slo-ttft-ms", "100"), ("x-flowprefill-slo-ms", "100"))
    assert (twice.field, "contradicts x-slo-ttft-ms" in twice.problem) == ("x-flowprefill-slo-ms", True)
    tiers = refusal(("x-slo-tier", "premium"), service_tier="flex")
    assert (tiers.field, "contradicts service_tier" in tiers.problem) == ("x-slo-tier", True)


def test_auto_and_an_equal_tier_contradict_nothing():
    assert objective(("x-slo-tier", "premium"), service_tier="auto").tier == PREMIUM
    assert objective(("x-slo-tier", "premium"), service_tier="priority").tier == PREMIUM


def test_unknown_tiers_and_misspelt_headers_are_refused():
    assert refusal(("x-slo-tier", "gold")).valid == "give one of premium, standard, background"
    assert refusal(service_tier="scale").field == "service_tier"
    assert refusal(("x-slo-ttft", "100")).field == "x-slo-ttft"


@pytest.mark.parametrize("name", sorted(OBJECTIVE_HEADERS))
def test_a_misspelling_of_any_header_is_refused(name):
    assert refusal((name[:-1], "100")).field == name[:-1]


@given(st.floats(MIN_OBJECTIVE_MS, MAX_OBJECTIVE_MS))
def test_every_number_in_range_is_read_as_it_is_written(value_ms):
    assert math.isclose(parse_objective_ms("x", repr(value_ms)) * 1000, value_ms)


@given(st.text(max_size=20))
def test_any_text_is_either_a_valid_objective_or_refused(text):
    try:
        value_s = parse_objective_ms("x", text)
    except FieldError:
        return
    assert MIN_OBJECTIVE_MS / 1000 <= value_s <= MAX_OBJECTIVE_MS / 1000


def test_a_tier_cannot_have_two_ttft_objectives():
    with pytest.raises(ValueError, match="not both"):
        TierPolicy(0.1, None, True, 1.0, ttft_scale=1.3)


# Tiers of one's own


@pytest.mark.parametrize("tiers", [FOUR, SEVEN], ids=["four", "seven"])
def test_every_tier_of_a_set_can_be_asked_for_and_no_other(tiers):
    for tier in tiers.names:
        assert objective(("x-slo-tier", tier), tiers=tiers, highest=None).tier == tier
    assert objective(tiers=tiers, highest=None).tier == tiers.default
    assert objective(service_tier="default", tiers=tiers, highest=None).tier == tiers.default
    for name in ("premium", "system", "none", ""):
        error = refusal(("x-slo-tier", name), tiers=tiers)
        assert error.valid == f"give one of {', '.join(tiers.names)}"


def test_service_tiers_are_those_of_the_set():
    assert objective(service_tier="batch", tiers=FOUR, highest=None).tier == FILE
    assert objective(("x-slo-tier", "text"), service_tier="priority", tiers=FOUR, highest=None).tier == TEXT
    assert (
        refusal(service_tier="scale", tiers=FOUR).valid == "give one of auto, default, priority, flex, batch"
    )
    assert refusal(service_tier="priority", tiers=SEVEN).valid == "give one of auto, default"
    assert refusal(("x-slo-tier", "file"), service_tier="priority", tiers=FOUR).field == "x-slo-tier"


@given(st.sampled_from(SEVEN.names), st.sampled_from(SEVEN.names))
def test_nobody_is_served_above_their_cap(asked, highest):
    got = objective(("x-slo-tier", asked), tiers=SEVEN, highest=highest)
    assert SEVEN.rank(got.tier) == min(SEVEN.rank(asked), SEVEN.rank(highest))
    assert got.clamped_from == (None if got.tier == asked else asked)
    assert got.ttft_s == SEVEN[got.tier].ttft_s


@pytest.mark.parametrize(
    ("objective", "budget_s", "missed_s"),
    [
        (Objective(STANDARD, 0.5, None), 0.4, 0.4),
        (Objective(STANDARD, 0.5, None), None, 0.5),
        (Objective(STANDARD, None, None, e2e_s=9.0), 3.0, None),
        (Objective(STANDARD, None, 0.05), None, None),
        (Objective(STANDARD, None, None, ttft_scale=4.0), 0.4, 0.4),
        (Objective(STANDARD, None, None, ttft_scale=4.0), None, math.inf),
    ],
    ids=[
        "as it was placed",
        "nobody looked",
        "promised is the end",
        "nothing is promised",
        "a multiple that was worked out",
        "a multiple that nobody has worked out",
    ],
)
def test_what_a_first_token_is_judged_by(objective, budget_s, missed_s):
    assert objective.judged_ttft_s(budget_s) == missed_s


ALONE = Alone(prefill_s=0.1, ttft_s=0.15, tpot_s=0.02, e2e_s=2.0)


@pytest.mark.parametrize(
    ("objective", "out_of_reach"),
    {
        "nothing is promised": (Objective(STANDARD, None, None), ()),
        "all of it can be kept": (Objective(STANDARD, 0.15, 0.02, e2e_s=2.0), ()),
        "the first token cannot": (Objective(STANDARD, 0.001, 0.02), ("ttft",)),
        "nor its multiple": (Objective(STANDARD, None, None, ttft_scale=1.4), ("ttft",)),
        "a longer one can": (Objective(STANDARD, None, None, ttft_scale=1.6), ()),
        "the pace cannot": (Objective(STANDARD, 0.2, 0.01), ("tpot",)),
        "the end cannot": (Objective(STANDARD, 0.2, None, e2e_s=1.9), ("e2e",)),
        "nothing can": (Objective(STANDARD, 0.001, 0.001, e2e_s=0.001), ("ttft", "tpot", "e2e")),
    }.values(),
)
def test_what_would_be_missed_with_the_fleet_to_oneself(objective, out_of_reach):
    assert objective.out_of_reach(ALONE) == out_of_reach


def test_what_nobody_knows_puts_nothing_out_of_reach():
    assert Objective(STANDARD, 0.001, 0.001, e2e_s=0.001).out_of_reach(Alone(0.0, 0.0, 0.0, 0.0)) == ()
