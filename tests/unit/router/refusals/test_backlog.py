"""The queue of prefill: what lengthens and shortens it, and who is refused in an overload."""

import pytest
from gated_router import ask, report, router

from slo.errors import Rejected, RejectionReason
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM


def test_a_prefix_saves_no_work_while_its_replica_takes_none():
    core, admission = router(replicas=2)
    prefix = {"prefix_hashes": tuple(range(7)), "hash_block": 128}
    assert ask(core, "first", tokens=1000, **prefix).prefill_replica == "prefill-0"
    report(core, ended=(JobId("first"),), hits=((JobId("first"), 0),), draining=True)
    assert admission.backlog_s(BACKGROUND) == 0
    assert ask(core, "second", tokens=1000, **prefix).prefill_replica == "prefill-1"
    assert admission.backlog_s(BACKGROUND) == pytest.approx(1.0)


def test_odd_prompts_of_one_tenant_change_nothing_for_another():
    def tokens(core, tenant):
        return ask(core, f"of {tenant}", PREMIUM, tokens=None, prompt_bytes=4000, tenant=tenant).tokens

    core, _ = router()
    before = tokens(core, "other")
    report(core, learned=(("odd", 16_000, 1000),) * 200)
    assert tokens(core, "other") == before == 1000
    assert tokens(core, "odd") == pytest.approx(250, rel=0.01)


def test_short_chats_of_a_tenant_do_not_make_its_long_texts_count_as_longer():
    """A chat template adds tokens that the text of a prompt has no bytes for."""
    core, admission = router()
    for _ in range(12):
        report(core, learned=(*[("a", 60, 40)] * 100, ("a", 8000, 2000)))
    beginning = {"prefix_hashes": tuple(range(10)), "hash_block": 512}
    long = {"tokens": None, "prompt_bytes": 8000, **beginning}
    assert ask(core, "first", PREMIUM, **long).tokens == pytest.approx(2000, rel=0.1)
    assert admission.backlog_s(PREMIUM) == pytest.approx(2.0, rel=0.1)
    assert ask(core, "second", PREMIUM, **long).cached_tokens == pytest.approx(1280, rel=0.1)
    assert ask(core, "short", PREMIUM, tokens=None, prompt_bytes=60).tokens == pytest.approx(40, rel=0.1)


def test_the_end_of_a_prefill_shortens_the_queue():
    core, admission = router()
    ask(core, "first", tokens=1000)
    assert admission.backlog_s(BACKGROUND) == pytest.approx(1.0)
    report(core, now_s=1.0, ended=(JobId("first"),))
    assert admission.backlog_s(BACKGROUND) == 0.0


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
