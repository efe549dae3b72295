"""From the gate of the router to the error answer: what is refused, why, and when to come back."""

import json
import random
import re
from collections import Counter
from dataclasses import fields

import pytest

from deployments.http.errors import rejected
from router.admission import Gate
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import JobEnded, Placed, PlacementReason, PlacementRequested
from router.placement.registry import POLICIES
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import KeyLimit, TenantGates, TenantLimit, Usage
from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import Holding
from slo.errors import Rejected, RejectionReason
from slo.objectives import Objective
from slo.outcomes import Outcome
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, OutstandingJob, PrefillReported, ReplicaGone
from slo.request import JobId, Party, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

OBJECTIVE = Objective(STANDARD, 0.5, None)
LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
LIMITS = {
    RejectionReason.REQUEST_RATE,
    RejectionReason.TOKEN_RATE,
    RejectionReason.OUTPUT_TOKEN_RATE,
    RejectionReason.CONCURRENCY,
}
NOBODY = {RejectionReason.NO_REPLICA, RejectionReason.NOT_SETTLED}


@pytest.mark.parametrize("reason", RejectionReason)
def test_every_refusal_has_its_answer(reason):
    infeasible = reason is RejectionReason.DEADLINE_INFEASIBLE
    error = rejected(
        Rejected(reason, 2.3, 0.9 if infeasible else None, 0.5), {"x-slo-tier": "standard"}, OBJECTIVE
    )
    body = json.loads(error.response().body)["error"]
    assert body["code"] == reason.value
    assert body["message"]
    assert error.headers == {"x-slo-tier": "standard", "retry-after": "3"}
    assert error.status == (503 if reason in NOBODY else 429)
    if reason in LIMITS:
        assert (body["type"], error.outcome) == ("rate_limit_error", Outcome.REJECTED)
    elif reason in NOBODY:
        assert (body["type"], error.outcome) == ("service_unavailable", Outcome.SHED)
    else:
        assert (body["type"], error.outcome) == ("overloaded_error", Outcome.SHED)


def router(replicas=1, **limits):
    """A settled router with idle replicas."""
    admission = AdmissionController(
        DEFAULT_TIERS, AdmissionRules(), TenantGates(limits), random.Random(1).random
    )
    core = RouterCore(DEFAULT_TIERS, POLICIES["least_harm"](random.Random(1).randrange), gate=Gate(admission))
    for number in range(replicas):
        report(core, number)
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    return core, admission


def report(core, number=0, now_s=0.0, **about):
    core.prefill_reported(
        PrefillReported(ReplicaId(f"prefill-{number}"), LINE, (), None, 0.0, **about), now_s
    )


def ask(core, name, tier=BACKGROUND, tokens=100, tenant="a", now_s=0.0, ttft_s=None, **about):
    about = {"prompt_tokens": tokens, "prompt_bytes": 0, "tenant": tenant, **about}
    return core.place(PlacementRequested(JobId(name), Objective(tier, ttft_s, None), True, **about), now_s)


def test_a_tenant_at_its_limit_is_refused_until_one_of_its_requests_has_ended():
    core, _ = router(a=TenantLimit(max_concurrent=1))
    assert isinstance(ask(core, "first"), Placed)
    refused = ask(core, "second")
    assert (refused.reason, refused.predicted_ttft_s) == (RejectionReason.CONCURRENCY, None)
    assert isinstance(ask(core, "other", tenant="b"), Placed)
    assert not any(job in replica.jobs for replica in core.view.prefill.values() for job in ["second"])
    core.job_ended(JobEnded(JobId("first")), 1.0)
    assert isinstance(ask(core, "third", now_s=1.0), Placed)


def test_a_request_that_is_refused_for_its_deadline_takes_no_place_of_its_tenant():
    core, admission = router(a=TenantLimit(max_concurrent=1))
    refused = ask(core, "late", STANDARD, tokens=10_000, ttft_s=0.1)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert admission.backlog_s(STANDARD) == 0.0
    assert isinstance(ask(core, "next"), Placed)


def test_every_answer_to_a_prompt_counts_against_its_tenant():
    core, _ = router()
    limit = TenantLimit(tokens_per_s=1.0, burst_tokens=1000)
    assert isinstance(ask(core, "ten", answers_per_prompt=10, limit=limit), Placed)
    assert ask(core, "one", limit=limit).reason is RejectionReason.TOKEN_RATE
    assert isinstance(ask(core, "other", tenant="b", limit=limit), Placed)


def test_every_prompt_of_a_request_counts_against_its_tenant():
    limits = RouterLimits(longest=8192)
    gate = Gate(AdmissionController(DEFAULT_TIERS, AdmissionRules(), TenantGates({}), lambda: 1.0))
    core = RouterCore(DEFAULT_TIERS, POLICIES["least_harm"](random.Random(1).randrange), limits, gate=gate)
    report(core)
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    limit = TenantLimit(tokens_per_s=1000.0, burst_tokens=100_000)
    assert isinstance(ask(core, "batch", tokens=16 * 8000, prompts=16, limit=limit), Placed)
    refused = ask(core, "one", tokens=8000, limit=limit)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.TOKEN_RATE, pytest.approx(36.0))


def test_a_prefix_saves_no_work_while_its_replica_takes_none():
    core, admission = router(replicas=2)
    prefix = {"prefix_hashes": tuple(range(7)), "hash_block": 128}
    assert ask(core, "first", tokens=1000, **prefix).prefill_replica == "prefill-0"
    report(core, ended=(JobId("first"),), draining=True)
    assert admission.backlog_s(BACKGROUND) == 0
    assert ask(core, "second", tokens=1000, **prefix).prefill_replica == "prefill-1"
    assert admission.backlog_s(BACKGROUND) == pytest.approx(1.0)


def test_output_is_reserved_until_the_end_says_how_much_there_was():
    core, _ = router()
    limit = TenantLimit(output_tokens_per_s=1.0, burst_output_tokens=1000)
    assert isinstance(ask(core, "first", output_tokens=900, limit=limit), Placed)
    assert ask(core, "second", output_tokens=900, limit=limit).reason is RejectionReason.OUTPUT_TOKEN_RATE
    core.job_ended(JobEnded(JobId("first"), used=Usage(100, 10)), 0.0)
    assert isinstance(ask(core, "third", output_tokens=900, limit=limit), Placed)


@pytest.mark.parametrize("is_heard_first", [False, True])
@pytest.mark.parametrize("of_key", [False, True])
def test_of_an_answer_whose_client_has_left_who_generated_it_says_how_much_there_was(is_heard_first, of_key):
    """As of one that does not stream: the ingress has seen nothing of it."""
    core, _ = router()
    limit = TenantLimit(output_tokens_per_s=1.0, burst_output_tokens=1000)
    mine = {"key_limit": KeyLimit("ci", limit)} if of_key else {"limit": limit}
    assert isinstance(ask(core, "first", output_tokens=900, **mine), Placed)
    if is_heard_first:
        core.generated(JobId("first"), 10, 0.0)
        core.job_ended(JobEnded(JobId("first")), 0.0)
    else:
        core.job_ended(JobEnded(JobId("first")), 0.0)
        assert ask(core, "second", output_tokens=900, **mine).reason is RejectionReason.OUTPUT_TOKEN_RATE
        core.generated(JobId("first"), 10, 0.0)
    assert isinstance(ask(core, "third", output_tokens=900, **mine), Placed)
    refused = ask(core, "fourth", output_tokens=100, **mine)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.OUTPUT_TOKEN_RATE, 10.0)


def test_of_one_that_went_on_elsewhere_the_larger_word_counts():
    """A replica that hung says what it had when it is left, and the next one what there was in the end."""
    core, _ = router()
    limit = TenantLimit(output_tokens_per_s=10.0, burst_output_tokens=1000)
    assert isinstance(ask(core, "first", output_tokens=900, limit=limit), Placed)
    core.generated(JobId("first"), 10, 0.0)
    core.job_ended(JobEnded(JobId("first")), 0.0)
    core.generated(JobId("first"), 300, 0.0)
    core.generated(JobId("first"), 20, 0.0)
    refused = ask(core, "second", output_tokens=1000, limit=limit)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.OUTPUT_TOKEN_RATE, 30.0)


def test_a_word_on_what_was_generated_changes_nothing_that_is_known():
    core, _ = router()
    limit = TenantLimit(output_tokens_per_s=10.0, burst_output_tokens=1000)
    assert isinstance(ask(core, "first", output_tokens=900, limit=limit), Placed)
    core.job_ended(JobEnded(JobId("first"), used=Usage(100, 400)), 0.0)
    core.generated(JobId("first"), 10, 0.0)
    core.generated(JobId("of another router"), 10, 0.0)
    refused = ask(core, "second", output_tokens=1000, limit=limit)
    assert refused.retry_after_s == 40.0


def test_a_request_that_is_refused_for_its_deadline_takes_nothing_of_its_tenant():
    core, _ = router()
    limit = TenantLimit(tokens_per_s=1.0, burst_tokens=10_000)
    late = ask(core, "late", STANDARD, tokens=10_000, ttft_s=0.1, limit=limit)
    assert late.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert isinstance(ask(core, "next", tokens=10_000, limit=limit), Placed)


@pytest.mark.parametrize(
    ("objective", "header"),
    [
        (Objective(STANDARD, None, None, e2e_s=0.2), "x-slo-e2e-ms"),
        (Objective(STANDARD, 9.0, None, e2e_s=0.2), "x-slo-e2e-ms"),
        (Objective(STANDARD, 0.1, None, e2e_s=90.0), "x-slo-ttft-ms"),
        (Objective(STANDARD, 0.1, None), "x-slo-ttft-ms"),
        (Objective(STANDARD, None, None, ttft_scale=0.01), "x-slo-ttft-ms"),
    ],
)
def test_a_refusal_names_the_header_that_would_give_it_more_time(objective, header):
    core, _ = router()
    asked = PlacementRequested(JobId("late"), objective, True, 10_000, 0)
    refused = core.place(asked, 0.0)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert rejected(refused, {}, objective).message.endswith(f"ask for a longer {header}")


def busy_router():
    """A router whose one replica has half a minute to go."""
    core, _ = router()
    running = OutstandingJob(JobId("long"), BACKGROUND, 30_000, None)
    core.prefill_reported(PrefillReported(ReplicaId("prefill-0"), LINE, (running,), running.job_id, 0.0), 0.0)
    return core


@pytest.mark.parametrize(
    ("objective", "is_explicit", "helps"),
    [
        (Objective(STANDARD, 0.05, None), True, False),
        (Objective(STANDARD, 0.2, None), True, True),
        (Objective(STANDARD, None, None, e2e_s=0.05), True, False),
        (Objective(STANDARD, None, None, e2e_s=5.0), True, True),
        (Objective(STANDARD, 0.05, None), False, True),
        (Objective(STANDARD, None, None, ttft_scale=0.5), True, False),
        (Objective(STANDARD, None, None, ttft_scale=1.5), True, True),
    ],
)
def test_a_deadline_that_an_idle_replica_could_not_keep_is_not_to_be_tried_again(
    objective, is_explicit, helps
):
    core = busy_router()
    refused = core.place(PlacementRequested(JobId("late"), objective, is_explicit, 100, 0), 0.0)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert (refused.retry_after_s is not None) == helps
    error = rejected(refused, {}, objective)
    assert ("retry-after" in error.headers) == helps
    assert error.headers.get("x-should-retry") == (None if helps else "false")
    assert ("retry later" in error.message) == helps
    assert ("not even an idle replica could be in time" in error.message) != helps


@pytest.mark.parametrize("e2e_s", [0.05, 0.5])
def test_so_is_an_end_of_the_clients_own_before_which_no_first_token_comes(e2e_s):
    core = busy_router()
    objective = Objective(STANDARD, 0.01, None, e2e_s=e2e_s)
    asked = PlacementRequested(JobId("late"), objective, False, 100, 0, explicit_e2e=True)
    refused = core.place(asked, 0.0)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert (refused.retry_after_s is None) == (e2e_s < 0.1)


@pytest.mark.parametrize("of_key", [False, True])
def test_a_request_that_is_refused_for_its_deadline_says_nothing_of_how_long_one_takes(of_key):
    core, _ = router()
    limit = TenantLimit(max_concurrent=1)
    mine = {"key_limit": KeyLimit("ci", limit)} if of_key else {"limit": limit}
    for number in range(200):  # until their mean is 30 s
        now_s = 30.0 * number
        report(core, now_s=now_s)
        core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), now_s)
        assert isinstance(ask(core, f"{number}", now_s=now_s, **mine), Placed)
        if number < 199:
            core.job_ended(JobEnded(JobId(f"{number}")), now_s + 30.0)
    core.job_ended(JobEnded(JobId("199")), now_s := now_s + 5.0)
    for number in range(50):
        late = ask(core, f"late-{number}", STANDARD, tokens=10_000, ttft_s=0.1, now_s=now_s, **mine)
        assert late.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert isinstance(ask(core, "next", now_s=now_s, **mine), Placed)
    refused = ask(core, "one more", now_s=now_s, **mine)
    wait_s = pytest.approx(30.0, abs=2.0)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.CONCURRENCY, wait_s)


def test_a_request_that_is_refused_for_its_deadline_is_none_of_its_tenants_requests_per_second():
    core, _ = router()
    limit = TenantLimit(requests_per_s=1.0)
    late = ask(core, "late", STANDARD, tokens=10_000, ttft_s=0.1, limit=limit)
    assert late.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert isinstance(ask(core, "next", limit=limit), Placed)
    assert ask(core, "third", limit=limit).reason is RejectionReason.REQUEST_RATE


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
    admission.follow({BACKGROUND: 1.0}, 0.1)
    shed = ask(core, "other", tenant="b", only_decode=True)
    assert shed.reason is RejectionReason.SHED_BY_POLICY


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


def test_odd_prompts_of_one_tenant_change_nothing_for_another():
    def tokens(core, tenant):
        return ask(core, f"of {tenant}", PREMIUM, tokens=None, prompt_bytes=4000, tenant=tenant).tokens

    core, _ = router()
    before = tokens(core, "other")
    report(core, learned=(("odd", 16_000, 1000),) * 200)
    assert tokens(core, "other") == before == 1000
    assert tokens(core, "odd") == pytest.approx(250, rel=0.01)


def test_the_end_of_a_prefill_shortens_the_queue():
    core, admission = router()
    ask(core, "first", tokens=1000)
    assert admission.backlog_s(BACKGROUND) == pytest.approx(1.0)
    report(core, now_s=1.0, ended=(JobId("first"),))
    assert admission.backlog_s(BACKGROUND) == 0.0


def full_decode(step_s=0.1, remaining=200, **about):
    """A decode replica whose one stream holds nearly all of its memory for so many steps more."""
    load = DecodeLoad(10_000, 0, 0, step_s, {JobId("there"): Holding(9000, remaining)}, {BACKGROUND: 50})
    return DecodeReported(ReplicaId("decode"), 0.9, 1, kv_tokens=10_000, load=load, **about)


def test_a_request_without_memory_on_decode_is_told_when_to_come_back():
    core, admission = router(a=TenantLimit(max_concurrent=1))
    core.view.decode_reported(full_decode(), 0.0)
    refused = ask(core, "first", tokens=600)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.DECODE_FULL, pytest.approx(20.0))
    assert not any(replica.jobs for replica in core.view.prefill.values()), "nothing is prefilled in vain"
    assert admission.backlog_s(BACKGROUND) == 0.0
    core.view.decode_reported(full_decode(remaining=500, step_s=10.0), 0.0)
    assert ask(core, "first", tokens=600).retry_after_s == 60.0
    core.view.decode_reported(full_decode(), 0.0)
    assert isinstance(ask(core, "small", tokens=100), Placed), "of its tenant's one place nothing is taken"


def test_what_decode_has_no_memory_for_asks_for_no_prefill_replica():
    """Clients that come again and again would have the prefill tier grow, and decode is as full as before."""
    core, admission = router()
    for second in range(60):
        core.view.decode_reported(full_decode(remaining=200 + second % 2), float(second))
        report(core, now_s=float(second))
        for number in range(10):
            refused = ask(core, f"{second}-{number}", tokens=600, now_s=float(second))
            assert refused.reason is RejectionReason.DECODE_FULL
        assert isinstance(ask(core, f"{second}-small", tokens=100, now_s=float(second)), Placed)
        core.job_ended(JobEnded(JobId(f"{second}-small")), float(second))
    work_s, _ = admission.demand(60.0)
    assert work_s == pytest.approx(0.1, rel=0.1), "of those that were placed"


def test_what_is_late_for_want_of_decodes_memory_alone_asks_for_no_prefill_replica():
    core, admission = router()
    core.view.decode_reported(full_decode(remaining=40), 0.0)
    late = ask(core, "late", tokens=600, ttft_s=1.0, decode_samples_first=True)
    assert late.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert admission.demand(1.0)[0] == pytest.approx(0.0, abs=1e-9)
    slow = ask(core, "slow", tokens=6000, ttft_s=1.0)
    assert slow.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert admission.demand(2.0)[0] > 0.1, "as what prefill itself would be too late with"


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
    report(core, ended=(JobId("first"),))
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


def test_memory_that_comes_soon_is_waited_for_and_the_top_tier_is_never_refused():
    core, _ = router()
    core.view.decode_reported(full_decode(remaining=40), 0.0)
    assert isinstance(ask(core, "soon", tokens=600), Placed)
    core.view.decode_reported(full_decode(), 0.0)
    assert isinstance(ask(core, "top", PREMIUM, tokens=5000), Placed)


def test_another_decode_replica_with_memory_takes_it():
    core, _ = router()
    core.view.decode_reported(full_decode(), 0.0)
    core.view.decode_reported(DecodeReported(ReplicaId("other"), 0.95, 60, kv_tokens=10_000), 0.0)
    load = DecodeLoad(10_000, 0, 0, 0.1, {JobId("x"): Holding(5000, 10)})
    core.view.decode_reported(DecodeReported(ReplicaId("free"), 0.5, 60, kv_tokens=10_000, load=load), 0.0)
    assert ask(core, "one", tokens=600).decode_replica == "free"


def test_what_was_placed_has_a_ticket_until_it_ends():
    core, _ = router()
    load = DecodeLoad(2000, 0, 0, 0.1, {JobId("x"): Holding(100, 200)}, {BACKGROUND: 400})
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0, load=load), 0.0)
    assert isinstance(ask(core, "first", tokens=600), Placed)
    assert ask(core, "second", tokens=600).reason is RejectionReason.DECODE_FULL
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0, load=load), 0.5)
    assert ask(core, "third", tokens=600).reason is RejectionReason.DECODE_FULL
    core.job_ended(JobEnded(JobId("first")), 1.0)
    assert isinstance(ask(core, "fourth", tokens=600), Placed)


def test_what_others_hold_of_a_prompt_on_decode_is_no_reason_to_refuse_it():
    core, _ = router()
    load = DecodeLoad(10_000, 0, 0, 0.1, {JobId("there"): Holding(100, 200)}, {BACKGROUND: 100})
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 1, load=load, kv_tokens=10_000), 0.0)
    prefix = {"prefix_hashes": tuple(range(30)), "hash_block": 128}
    for number in range(15):
        assert isinstance(ask(core, f"alike-{number}", tokens=4000, **prefix), Placed), number
    other = {"prefix_hashes": tuple(range(100, 130)), "hash_block": 128}
    assert ask(core, "other", tokens=4000, **other).reason is RejectionReason.DECODE_FULL
    for number in range(15):
        core.job_ended(JobEnded(JobId(f"alike-{number}")), 1.0)
    assert isinstance(ask(core, "other", tokens=4000, **other), Placed)
    assert isinstance(ask(core, "first", tokens=4000, **prefix), Placed), "nobody holds it any more"
    assert ask(core, "third", tokens=4000).reason is RejectionReason.DECODE_FULL
    core.view.replica_gone(ReplicaGone(ReplicaId("decode")))
    assert len(core.view.held) == 0


def test_without_a_prefix_cache_on_decode_each_holds_its_prompt_alone():
    core, _ = router()
    load = DecodeLoad(10_000, 0, 0, 0.1, {JobId("there"): Holding(100, 200)}, {BACKGROUND: 100})
    told = DecodeReported(ReplicaId("decode"), 0.0, 1, load=load, kv_tokens=10_000, caches_prefixes=False)
    core.view.decode_reported(told, 0.0)
    prefix = {"prefix_hashes": tuple(range(30)), "hash_block": 128}
    found = [ask(core, str(number), tokens=4000, **prefix) for number in range(3)]
    assert [isinstance(one, Placed) for one in found] == [True, True, False]


def test_a_prompt_that_decode_computes_after_all_has_a_ticket_there():
    core, _ = router()
    load = DecodeLoad(2000, 0, 0, 0.1, {JobId("x"): Holding(100, 200)}, {BACKGROUND: 400})
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0, load=load), 0.0)
    assert isinstance(ask(core, "first", tokens=600), Placed)
    core.not_for_prefill(JobId("first"))
    assert not core.view.prefill["prefill-0"].jobs
    assert ask(core, "second", tokens=600).reason is RejectionReason.DECODE_FULL


def test_load_is_relative_to_the_replicas_that_there_are():
    loads = []
    for replicas in (1, 4):
        core, admission = router(replicas)
        for number in range(10):
            ask(core, f"{number}", PREMIUM, tokens=1000, now_s=number / 10)
        loads.append(admission.load(1.0))
    assert loads[0] == pytest.approx(4 * loads[1])


def test_an_overload_is_refused_by_share_with_a_time_to_come_back():
    core, _ = router()
    decisions = []
    for number in range(400):
        now_s = number / 20
        report(core, now_s=now_s)
        core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), now_s)
        decisions.append(ask(core, f"{number}", tokens=200, now_s=now_s))
    refused = [decision for decision in decisions if isinstance(decision, Rejected)]
    assert refused
    assert {decision.reason for decision in refused} <= {
        RejectionReason.OVER_SHARE,
        RejectionReason.RESERVED,
        RejectionReason.BACKLOG,
    }
    assert all(1.0 <= decision.retry_after_s <= 60.0 for decision in refused)


@pytest.mark.parametrize("reason", sorted(LIMITS))
def test_a_refusal_names_the_limit_and_whose_it_is(reason):
    of_tenant, of_key = (
        rejected(Rejected(reason, 1.0, key_name=name), {}, OBJECTIVE).message for name in (None, "ci")
    )
    limit = re.search(r" limits\.(\w+)", of_tenant)[1]
    assert limit in {field.name for field in fields(TenantLimit)}
    assert of_tenant.startswith("this tenant ")
    assert of_key.startswith("the key 'ci' of this tenant ")
    assert f"key_limits.{limit}" in of_key
