"""Which prompts decode computes itself, and what is predicted and promised of them."""

import dataclasses

import pytest

from router.core import RouterCore
from router.fleet.decode_replica import DecodeView
from router.fleet.view import RouterLimits
from router.messages import Placed, PlacementReason, PlacementRequested
from router.placement.least_harm import LeastHarm
from router.placement.local_prefill import is_cheaper_on_decode
from router.placement.policies import NewPrefill
from slo.errors import RejectionReason
from slo.objectives import Objective
from slo.predict.handoff import TransferFit
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.02, handoff_s=0.1)
PREFILL, DECODE = ReplicaId("prefill"), ReplicaId("decode")
NO_DEADLINE = Objective(BACKGROUND, None, None)


def router(*jobs, running=0, below=64, max_local=8, kv_usage=0.0):
    limits = RouterLimits(
        stale_after_s=100.0, local_prefill=True, max_local_prefills=max_local, local_below_tokens=below
    )
    core = RouterCore(DEFAULT_TIERS, LeastHarm(), limits)
    core.prefill_reported(PrefillReported(PREFILL, LINE, jobs, None, 0.0), 0.0)
    core.view.decode_reported(DecodeReported(DECODE, kv_usage, running, kv_tokens=10_000), 0.0)
    return core


def asked(tokens, number=0, objective=NO_DEADLINE, **rest):
    return PlacementRequested(JobId(f"job-{number}"), objective, False, tokens, 0, **rest)


def is_on_decode(placed):
    assert isinstance(placed, Placed)
    assert (placed.prefill_replica is None) == (placed.reason is PlacementReason.CHEAPER_ON_DECODE)
    return placed.prefill_replica is None


@pytest.mark.parametrize(
    ("tokens", "running", "on_decode"),
    [
        (10, 0, True),
        (10, 9, True),  # 9 streams wait for 10 ms each, the handoff takes 100 ms
        (10, 11, False),
        (60, 1, True),
        (60, 2, False),
        (64, 0, True),
        (65, 0, False),  # longer than is allowed
    ],
)
def test_a_short_prompt_is_computed_by_decode_where_that_delays_less(tokens, running, on_decode):
    assert is_on_decode(router(running=running).place(asked(tokens), 0.0)) is on_decode


def test_a_queue_at_prefill_is_a_part_of_the_way():
    ahead = OutstandingJob(JobId("long"), STANDARD, 1000, 0.5, 1.0)
    assert not is_on_decode(router(running=20).place(asked(40), 0.0))
    assert is_on_decode(router(ahead, running=20).place(asked(40), 0.0))


def test_streams_that_were_placed_since_the_last_report_count():
    core = router()
    places = [is_on_decode(core.place(asked(45, number), 0.0)) for number in range(5)]
    assert places == [True, True, True, False, False]


def test_what_decode_computes_is_predicted_and_is_no_work_of_the_prefill_tier():
    core = router()
    placed = core.place(asked(10, objective=Objective(STANDARD, 2.0, None), elapsed_s=0.5), 0.0)
    assert placed.predicted_ttft_s == pytest.approx(0.5 + 0.03 + 0.1)
    assert placed.ttft_budget_s == 2.0
    assert not core.view.prefill[PREFILL].jobs


def test_one_that_would_be_late_on_either_way_is_refused():
    late = asked(10, objective=Objective(STANDARD, 0.005, None))
    refused = router().place(dataclasses.replace(late, explicit_deadline=True), 0.0)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert refused.predicted_ttft_s == pytest.approx(0.03 + 0.1)


def test_what_a_tier_promises_is_stretched_and_what_is_never_shed_is_never_late():
    tight = Objective(STANDARD, 0.005, None)
    assert is_on_decode(router().place(asked(10, objective=tight), 0.0))
    premium = asked(10, objective=Objective(PREMIUM, 0.005, None))
    assert is_on_decode(router().place(dataclasses.replace(premium, explicit_deadline=True), 0.0))


def test_one_whose_way_over_decode_is_too_slow_goes_where_its_prefix_is():
    core, prefix = router(), {"prefix_hashes": (1, 2, 3), "hash_block": 16}
    core.view.prefixes.placed(PREFILL, JobId("before"), prefix["prefix_hashes"], 16)
    tight = asked(50, objective=Objective(STANDARD, 0.15, None), **prefix)
    assert is_on_decode(core.place(dataclasses.replace(tight), 0.0))
    assert not is_on_decode(core.place(dataclasses.replace(tight, explicit_deadline=True), 0.0))


@pytest.mark.parametrize(
    "settings", [{"below": 0}, {"max_local": 0}, {"kv_usage": 0.96}, {"running": 1000}], ids=str
)
def test_the_prefill_tier_computes_what_decode_may_or_can_not(settings):
    assert not is_on_decode(router(**settings).place(asked(10), 0.0))


def test_a_prefill_that_is_placed_again_is_not_left_to_decode_for_its_length():
    assert not is_on_decode(router().place(asked(10, is_admitted=True), 0.0))


def test_a_slow_link_is_a_part_of_the_way():
    core = router()
    replica = core.view.prefill[PREFILL]
    choice = LeastHarm().choose(NewPrefill(40, 10.0, 1.0), [replica], 0.0)
    streams = dataclasses.replace(DecodeView(DECODE), decoding=4)
    assert not is_cheaper_on_decode(40, choice, streams, 0.0, None)
    assert is_cheaper_on_decode(40, choice, streams, 0.0, TransferFit(0.1, 1e-6))
