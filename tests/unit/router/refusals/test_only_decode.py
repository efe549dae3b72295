"""What only decode can compute has a queue of its own, and is no work of the prefill tier."""

from collections import Counter

import pytest
from gated_router import ask, report, router

from router.messages import JobEnded, Placed, PlacementReason, PlacementRequested
from slo.admission.tenant_limits import TenantLimit
from slo.autoscaling.need import DecodeDemand, FleetDemand, FleetLoad, PrefillDemand
from slo.errors import RejectionReason
from slo.objectives import Objective
from slo.reports import DecodeReported, ReplicaGone
from slo.request import JobId, Party, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD


def test_what_decode_prefills_itself_still_runs():
    """Several answers to one prompt leave the prefill tier's account, not their tenant's."""
    core, admission = router(a=TenantLimit(max_concurrent=1))
    assert isinstance(ask(core, "several"), Placed)
    core.not_for_prefill(JobId("several"))
    assert admission.backlog_s(BACKGROUND) == 0.0
    work_s, *_ = admission.demand(2.0)
    assert work_s == pytest.approx(0.0, abs=1e-9), "nor does the tier grow for it"
    assert ask(core, "next").reason is RejectionReason.CONCURRENCY
    core.job_ended(JobEnded(JobId("several")), 1.0)
    assert isinstance(ask(core, "next", now_s=1.0), Placed)


def flooded(core, seconds=20.0, computed_per_s=2.0, **others):
    """Requests of a tenant for two answers each, 50 a second, beside others at their rates, on one replica.

    It reports each of its 0.1 s, and computes one prompt after the other, whosoever they are.
    """
    waiting, fates, now_s = Counter(), {name: Counter() for name in ("hog", *others)}, 0.0
    due_s = dict.fromkeys(fates, 0.0)
    rates = {"hog": 50.0, **others}
    for step in range(int(seconds * 10)):
        now_s = step / 10
        report(core, now_s=now_s)
        if step % int(10 / computed_per_s) == 0 and waiting:
            party = waiting.most_common()[-1][0]
            waiting[party] -= 1
            waiting += Counter()
        told = DecodeReported(ReplicaId("decode"), 0.1, 9, local_prefills=dict(waiting), local_prompt_s=0.5)
        core.view.decode_reported(told, now_s)
        for tenant, rate in rates.items():
            while due_s[tenant] <= now_s:
                due_s[tenant] += 1 / rate
                name = f"{tenant} {due_s[tenant]}"
                about = {"tokens": 4000, "tenant": tenant, "answers_per_prompt": 2, "only_decode": True}
                decision = ask(core, name, now_s=now_s, **about)
                fates[tenant][getattr(decision, "reason", None)] += 1
                if isinstance(decision, Placed):
                    waiting[Party(tenant, BACKGROUND)] += 2
    return fates, waiting.total()


def test_what_only_decode_can_compute_is_bounded_and_no_work_of_the_prefill_tier():
    core, admission = router()
    fates, waiting = flooded(core)
    assert set(fates["hog"]) == {PlacementReason.ONLY_DECODE, RejectionReason.BACKLOG}
    assert waiting <= 66, "a full queue, and both answers of the last one"
    assert admission.load(20.0) == 0.0
    assert admission.demand(20.0) == (0.0, 0.0), "no prefill replica comes for it"
    assert admission.backlog_s(BACKGROUND) == 0.0
    assert not core.view.prefill[ReplicaId("prefill-0")].jobs
    assert isinstance(ask(core, "by prefill", tenant="hog", now_s=20.0), Placed)


def test_who_floods_decode_is_refused_and_no_other_tenant():
    core, _ = router()
    fates, waiting = flooded(core, small=0.2)
    assert set(fates["small"]) == {PlacementReason.ONLY_DECODE}
    assert fates["hog"][RejectionReason.BACKLOG] > 900
    assert waiting <= 70


def test_when_to_come_again_is_reckoned_from_what_a_prompt_takes():
    core, _ = router()
    told = DecodeReported(
        ReplicaId("decode"), 0.1, 9, local_prefills={Party("a", BACKGROUND): 70}, local_prompt_s=3.0
    )
    core.view.decode_reported(told, 0.0)
    refused = ask(core, "one", only_decode=True)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.BACKLOG, 7 * 3.0)
    assert refused.predicted_ttft_s is None


def test_what_only_decode_can_compute_goes_where_it_is_taken():
    core, _ = router()
    full = DecodeReported(ReplicaId("decode"), 0.1, 0, local_prefills={Party("a", BACKGROUND): 70})
    core.view.decode_reported(full, 0.0)
    core.view.decode_reported(DecodeReported(ReplicaId("other"), 0.5, 9), 0.0)
    assert ask(core, "one", only_decode=True).decode_replica == "other"
    assert ask(core, "another").decode_replica == "decode", "by what else it has"


def test_no_deadline_and_no_prediction_is_made_of_prefills_queue_for_what_it_does_not_compute():
    core, _ = router()
    for number in range(9):
        ask(core, f"long {number}", tokens=10_000)
    placed = ask(core, "several", STANDARD, ttft_s=0.5, prompts=4, only_decode=True)
    assert (placed.prefill_replica, placed.reason) == (None, PlacementReason.ONLY_DECODE)
    assert (placed.predicted_ttft_s, placed.ttft_budget_s) == (None, 0.5)


def test_a_scaled_objective_is_of_each_prompt():
    core, _ = router()
    objective = Objective(STANDARD, None, None, ttft_scale=2.0)
    asked = PlacementRequested(JobId("several"), objective, False, 4000, 0, prompts=4, only_decode=True)
    assert core.place(asked, 0.0).ttft_budget_s == pytest.approx(2.0 * 4.0)


def test_what_only_decode_can_compute_is_held_to_its_tenants_limits_and_may_be_shed():
    core, admission = router(a=TenantLimit(max_concurrent=1))
    assert isinstance(ask(core, "first", only_decode=True), Placed)
    assert ask(core, "second", only_decode=True).reason is RejectionReason.CONCURRENCY
    assert isinstance(ask(core, "by prefill", tenant="b", tokens=10**9), Placed), "far above the tier's share"
    admission.follow({BACKGROUND: 1.0}, 0.1)
    shed = ask(core, "other", tenant="b", only_decode=True)
    assert shed.reason is RejectionReason.SHED_BY_POLICY


@pytest.mark.parametrize(
    ("about", "in_use", "sheds"),
    [
        ({"tokens": 50_000}, {"memory": 0.9, "pace": 0.1}, True),
        ({"tokens": 50_000}, {"memory": 0.1, "pace": 0.9}, False),
        ({"answers_per_prompt": 9}, {"memory": 0.1, "pace": 0.9}, True),
        ({"answers_per_prompt": 9}, {"memory": 0.1, "pace": 0.4}, False),
    ],
)
def test_what_a_request_takes_of_decode_are_its_answers_and_the_tokens_that_it_holds(about, in_use, sheds):
    """One of background beside twenty of premium, none of which asks anything of prefill."""
    core, admission = router()
    for number in range(20):
        ask(core, f"{number}", PREMIUM, tokens=100)
        core.not_for_prefill(JobId(f"{number}"))
    ask(core, "background", **about)
    core.not_for_prefill(JobId("background"))
    admission.decode.sees(DecodeDemand(requests=20, replicas=1, **in_use))
    admission.follow({BACKGROUND: 1.0}, 0.0)
    decision = ask(core, "next", now_s=0.5)
    assert isinstance(decision, Placed) is not sheds
    assert not sheds or decision.reason is RejectionReason.SHED_BY_POLICY


def test_without_a_prefill_replica_it_is_answered_whatever_decode_may_do_for_want_of_one():
    core, admission = router(replicas=0)
    assert isinstance(ask(core, "several", only_decode=True, now_s=9.0), Placed)
    assert admission.shown_load(9.0) == 0.0
    assert ask(core, "one", now_s=9.0).reason is RejectionReason.NO_REPLICA


def test_one_that_goes_on_after_a_loss_is_not_refused_for_the_queue():
    core, _ = router()
    full = DecodeReported(ReplicaId("decode"), 0.1, 0, local_prefills={Party("a", BACKGROUND): 500})
    core.view.decode_reported(full, 0.0)
    assert isinstance(ask(core, "several", only_decode=True, is_admitted=True), Placed)


@pytest.mark.parametrize("is_lost_before", [False, True])
def test_it_may_be_shed_where_nothing_else_is_asked_for(is_lost_before):
    """What prefill can do is known by its replicas, whoever asks."""
    core, admission = router()
    if is_lost_before:
        core.replica_gone(ReplicaGone(ReplicaId("prefill-0")), 9.0)
        assert ask(core, "by prefill", now_s=9.0).reason is RejectionReason.NO_REPLICA
        report(core, now_s=9.1)
    for number in range(4):
        ask(core, f"{number}", PREMIUM, only_decode=True, now_s=9.2)
    ask(core, "background", answers_per_prompt=9, only_decode=True, now_s=9.2)
    decode = DecodeDemand(0.1, 13, pace=0.9, replicas=1)
    prefill = PrefillDemand(*admission.demand(9.2), capacity=admission.capacity, replicas=1)
    assert FleetDemand(prefill, decode).load is FleetLoad.LOADED, "the monitor sheds for it"
    admission.decode.sees(decode)
    admission.follow({BACKGROUND: 1.0}, 0.0)
    assert ask(core, "next", only_decode=True, now_s=9.3).reason is RejectionReason.SHED_BY_POLICY
    assert isinstance(ask(core, "urgent", PREMIUM, only_decode=True, now_s=9.3), Placed)


def test_prefill_that_is_lost_can_do_nothing_whoever_asks():
    core, admission = router()
    assert isinstance(ask(core, "one", only_decode=True), Placed)
    assert admission.capacity == 1.0
    core.replica_gone(ReplicaGone(ReplicaId("prefill-0")), 9.0)
    assert isinstance(ask(core, "other", only_decode=True, now_s=9.0), Placed)
    assert (admission.capacity, admission.shown_load(9.0)) == (0.0, 0.0)
