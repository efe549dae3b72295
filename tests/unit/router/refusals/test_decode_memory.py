"""Who is refused for want of memory on decode, and who holds how much of it."""

import pytest
from gated_router import LINE, ask, full_decode, report, router

from router.messages import JobEnded, Placed
from slo.admission.tenant_limits import TenantLimit
from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import Holding
from slo.errors import RejectionReason
from slo.reports import DecodeReported, OutstandingJob, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM


def test_a_request_without_memory_on_decode_is_told_when_to_come_back():
    core, admission = router(a=TenantLimit(max_concurrent=1))
    core.view.decode_reported(full_decode(), 0.0)
    refused = ask(core, "first", tokens=600)
    assert (refused.reason, refused.retry_after_s) == (RejectionReason.DECODE_FULL, pytest.approx(20.0))
    assert refused.lacked_decode
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
    assert (late.reason, late.lacked_decode) == (RejectionReason.DEADLINE_INFEASIBLE, True)
    assert admission.demand(1.0)[0] == pytest.approx(0.0, abs=1e-9)
    running = OutstandingJob(JobId("long"), BACKGROUND, 30_000, None)
    core.prefill_reported(PrefillReported(ReplicaId("prefill-0"), LINE, (running,), running.job_id, 0.0), 0.0)
    slow = ask(core, "slow", tokens=6000, ttft_s=7.0)
    assert (slow.reason, slow.lacked_decode) == (RejectionReason.DEADLINE_INFEASIBLE, False)
    assert admission.demand(2.0)[0] > 0.1, "as what prefill itself would be too late with"


def test_what_decode_has_no_memory_for_asks_for_a_decode_replica():
    """Refusals would otherwise keep the tier from ever being as full as one that grows.

    One that comes again asks for nothing more, but others that are as long and begin alike do.
    """
    core, admission = router()
    assert isinstance(ask(core, "before"), Placed)
    core.not_for_prefill(JobId("before"))
    core.job_ended(JobEnded(JobId("before")), 10.0)
    report(core, now_s=10.0)
    core.view.decode_reported(full_decode(), 10.0)
    assert isinstance(ask(core, "there", PREMIUM, tokens=900, now_s=10.0), Placed)
    core.not_for_prefill(JobId("there"))
    admission.decode.sees(core.decode_demand(10.0))
    told = []
    for number in range(6):
        told.append(admission.decode.replicas_refused(10.0))
        prompt = {"prefix_hashes": (1, 2), "hash_block": 128, "prompt_hash": 1 + number}
        for again in range(1 + number):
            refused = ask(core, f"{number}-{again}", tokens=600, now_s=10.0, **prompt)
            assert refused.reason is RejectionReason.DECODE_FULL
    assert told == [pytest.approx(number * told[1]) for number in range(6)]
    assert told[1] > 0


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
