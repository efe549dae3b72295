"""Objectives that not even an idle fleet would keep are told."""

import pytest
from gated_router import ask, full_decode, report, router

from router.messages import PlacementRequested
from slo.objectives import Objective
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import PREMIUM, STANDARD


@pytest.mark.parametrize(
    ("tokens", "about", "out_of_reach"),
    [
        (100, {"ttft_s": 0.5}, ()),
        (100, {"ttft_s": 0.001}, ("ttft",)),
        (1000, {"ttft_s": 0.5}, ("ttft",)),
        (100, {"ttft_s": None}, ()),
    ],
)
@pytest.mark.parametrize("tier", [PREMIUM, STANDARD])
def test_what_not_even_an_idle_fleet_would_keep_is_told_with_the_place_and_with_a_refusal(
    tier, tokens, about, out_of_reach
):
    core, _ = router()
    assert ask(core, "alone", tier, tokens=tokens, **about).unattainable == out_of_reach
    for number in range(50):
        ask(core, f"{number}", PREMIUM, tokens=1000)
    waits = ask(core, "waits", tier, tokens=tokens, **about)
    assert waits.unattainable == out_of_reach, "whoever is in front of it"
    core.view.decode_reported(full_decode(), 0.0)
    assert ask(core, "full", tier, tokens=600, ttft_s=0.5).unattainable == ("ttft",)


def test_what_is_cached_of_a_prompt_may_bring_its_objective_into_reach():
    core, _ = router()
    prefix = {"prefix_hashes": tuple(range(7)), "hash_block": 128}
    assert ask(core, "first", PREMIUM, tokens=1000, ttft_s=0.5, **prefix).unattainable == ("ttft",)
    report(core, ended=(JobId("first"),), hits=((JobId("first"), 0),))
    assert ask(core, "second", PREMIUM, tokens=1000, ttft_s=0.5, **prefix).unattainable == ()


def test_a_pace_and_an_end_that_decode_does_not_reach_alone_are_out_of_reach():
    core, _ = router()
    for second in range(20):
        report(core, now_s=float(second))
        others = 8 * (second % 4)
        told = DecodeReported(ReplicaId("decode"), 0.1, 1 + others, tpot_s=0.02 + 0.001 * others)
        core.view.decode_reported(told, float(second))
    hurried = Objective(PREMIUM, 1.0, 0.015, e2e_s=1.0)
    asked = PlacementRequested(JobId("hurried"), hurried, True, 100, 0, output_tokens=100)
    assert core.place(asked, 19.0).unattainable == ("tpot", "e2e"), "a hundred tokens take two seconds"
    calm = Objective(PREMIUM, 1.0, 0.025, e2e_s=9.0)
    asked = PlacementRequested(JobId("calm"), calm, True, 100, 0, output_tokens=100)
    assert core.place(asked, 19.0).unattainable == ()
