"""Objectives that not even an idle fleet would keep are told."""

import pytest
from gated_router import ask, full_decode, report, router

from router.messages import PlacementRequested
from slo.errors import RejectionReason
from slo.objectives import Objective
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD


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


@pytest.mark.parametrize(("now_s", "out_of_reach"), [(29.0, ("tpot", "e2e")), (31.0, ())])
def test_what_the_pace_was_long_ago_puts_nothing_out_of_reach(now_s, out_of_reach):
    core, _ = router()
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.1, 1, tpot_s=0.5), 0.0)
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), now_s)
    report(core, now_s=now_s)
    asked = Objective(PREMIUM, 1.0, 0.1, e2e_s=3.0)
    placed = core.place(PlacementRequested(JobId("asked"), asked, True, 100, 0, output_tokens=20), now_s)
    assert placed.unattainable == out_of_reach


def hurried(core, name, tier, objective, **about):
    """The answer to a request whose pace an idle fleet would keep."""
    asked = Objective(tier, tpot_s=0.5, **objective)
    return core.place(PlacementRequested(JobId(name), asked, True, 600, 0, tenant="a", **about), 0.0)


@pytest.mark.parametrize(
    ("objective", "of_a_place", "of_a_refusal"),
    [
        ({"ttft_s": 0.001}, ("ttft",), ("ttft", "tpot")),
        ({"ttft_s": 5.0, "e2e_s": 0.001}, ("e2e",), ("ttft", "tpot", "e2e")),
    ],
)
@pytest.mark.parametrize(
    "reason", [RejectionReason.DEADLINE_INFEASIBLE, RejectionReason.DECODE_FULL], ids=lambda reason: reason
)
def test_nothing_is_in_reach_of_a_request_that_an_idle_fleet_would_refuse_too(
    objective, of_a_place, of_a_refusal, reason
):
    core, _ = router()
    assert hurried(core, "late", PREMIUM, objective).unattainable == of_a_place
    if reason is RejectionReason.DECODE_FULL:
        core.view.decode_reported(full_decode(), 0.0)
    refused = hurried(core, "refused", BACKGROUND, objective)
    assert (refused.reason, refused.unattainable) == (reason, of_a_refusal)


def test_the_pace_is_in_reach_of_a_request_that_an_idle_fleet_would_serve_late():
    core, _ = router()
    for number in range(50):
        ask(core, f"{number}", PREMIUM, tokens=1000)
    late = hurried(core, "late", PREMIUM, {"ttft_s": 0.001})
    assert (late.reason, late.unattainable) == (RejectionReason.BACKLOG, ("ttft",))
    core.view.decode_reported(full_decode(), 0.0)
    images = hurried(core, "images", BACKGROUND, {"ttft_s": 0.001}, only_decode=True)
    assert (images.reason, images.unattainable) == (RejectionReason.DECODE_FULL, ("ttft",))


def test_what_only_decode_computes_and_has_too_much_of_tells_what_is_out_of_reach():
    core, _ = router()
    for number in range(200):
        hurried(core, f"{number}", PREMIUM, {"ttft_s": 5.0}, only_decode=True)
    late = hurried(core, "late", PREMIUM, {"ttft_s": 0.001}, only_decode=True)
    assert (late.reason, late.unattainable) == (RejectionReason.BACKLOG, ("ttft",))
