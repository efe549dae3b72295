"""What the router makes of silence: of one replica, of all, and of its own; and of prompts taken back."""

from dataclasses import replace

import pytest
from small_router import POLICIES, core, report, request, runs

from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import Answered, JobEnded, Placed
from router.placement.least_harm import LeastHarm
from slo.errors import RejectionReason
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import PREMIUM, STANDARD

PREFIX = {"prefix_hashes": (1, 2, 3, 4), "hash_block": 200}


def prefill(router, name, now_s):
    router.prefill_reported(report(name, kv_tokens=100_000), now_s)


def decode(router, name, now_s):
    router.view.decode_reported(DecodeReported(ReplicaId(name), 0.1, 4, 100_000, 0.03), now_s)


def after_a_minute():
    """A fleet that has reported for a minute, one prefill replica of which has a prefix cached."""
    limits = RouterLimits(stale_after_s=10.0, settle_s=3.0)
    router = RouterCore(POLICIES, LeastHarm(), limits, started_s=0.0)
    for second in range(61):
        for number in range(2):
            prefill(router, f"prefill-{number}", float(second))
            decode(router, f"decode-{number}", float(second))
    placed = router.place(request("first", 1000, PREMIUM, **PREFIX), 60.0)
    assert isinstance(placed, Placed)
    return router, placed.prefill_replica


@pytest.mark.parametrize("silent_s", [10.0, 31.0])
@pytest.mark.parametrize("speaks", ["prefill-0", "prefill-1", "decode-0", "decode-1"])
def test_a_router_that_hears_its_replicas_again_has_kept_them_and_waits_for_the_others(silent_s, speaks):
    """Also the one that has the prefix, whoever speaks first."""
    router, where = after_a_minute()
    back_s = 60.0 + silent_s
    asked = request("again", 1000, PREMIUM, **PREFIX)
    (prefill if speaks.startswith("prefill") else decode)(router, speaks, back_s)
    assert router.place(asked, back_s + 0.1).reason is RejectionReason.NOT_SETTLED
    assert router.place(asked, back_s + 3.1).reason is RejectionReason.NO_REPLICA
    for number in range(2):
        prefill(router, f"prefill-{number}", back_s + 3.2)
        decode(router, f"decode-{number}", back_s + 3.2)
    placed = router.place(asked, back_s + 3.3)
    assert (placed.prefill_replica, placed.cached_tokens) == (where, 800)


def test_a_router_whose_replicas_are_all_lost_does_not_take_their_successor_for_one_that_it_missed():
    router, _ = after_a_minute()
    assert router.place(request(1, 10), 91.0).reason is RejectionReason.NO_REPLICA
    prefill(router, "another", 91.0)
    assert router.place(request(1, 10), 91.1).reason is RejectionReason.NO_REPLICA
    assert set(router.view.prefill) == {"another"}
    assert not router.view.decode


def test_replicas_that_stay_silent_are_forgotten_and_one_that_comes_back_has_what_it_had():
    router, where = after_a_minute()
    for second in range(61, 91):
        decode(router, "decode-0", float(second))
    prefill(router, where, 91.0)
    assert set(router.view.prefill) == {where}
    assert set(router.view.decode) == {"decode-0"}
    placed = router.place(request("again", 1000, PREMIUM, **PREFIX), 91.1)
    assert (placed.prefill_replica, placed.cached_tokens) == (where, 800)


LONG = {"prefix_hashes": tuple(range(30)), "hash_block": 200}


def taken_back(router, number, now_s, *seen):
    """A long prompt whose client leaves; what its replica reports of it before that."""
    placed = router.place(request(number, 6000, PREMIUM, **LONG), now_s)
    for its in seen:
        router.prefill_reported(its, now_s + 0.1)
    router.job_ended(JobEnded(JobId(f"job-{number}")), now_s + 0.2)
    return placed


@pytest.mark.parametrize("is_started", [True, False])
def test_what_is_taken_back_before_it_is_computed_is_not_cached(is_started):
    router = core(prefill=1)
    job = JobId("job-0")
    its = report("prefill-0", runs(0, 6000), running=job, hits=((job, 0),))
    taken_back(router, 0, 0.0, *([its] if is_started else []))
    assert router.place(request(1, 6000, PREMIUM, **LONG), 1.0).cached_tokens == 0


def test_what_waited_on_its_replica_and_was_taken_back_is_not_cached():
    """Also where the replica says so first."""
    router = core(prefill=1)
    taken_back(
        router, 0, 0.0, report("prefill-0", runs(0, 6000)), report("prefill-0", ended=(JobId("job-0"),))
    )
    assert router.place(request(1, 6000, PREMIUM, **LONG), 1.0).cached_tokens == 0


@pytest.mark.parametrize(
    "ended", [{"ttft_s": 6.1}, {"answered": Answered(STANDARD, "acme", 1)}], ids=["stream", "whole"]
)
def test_what_was_answered_is_cached_even_if_its_replica_has_not_said_so(ended):
    router = core(prefill=1)
    router.place(request(0, 6000, PREMIUM, **LONG), 0.0)
    router.job_ended(JobEnded(JobId("job-0"), **ended), 6.2)
    assert router.place(request(1, 6000, PREMIUM, **LONG), 7.0).cached_tokens == 5999


def test_the_end_of_an_earlier_attempt_is_not_that_of_the_one_that_waits_on_the_same_replica():
    router, job = core(prefill=1), JobId("job-0")
    asked = request(0, 6000, PREMIUM, **LONG)
    router.place(asked, 0.0)
    router.prefill_reported(report("prefill-0", runs(0, 6000), running=job, hits=((job, 0),)), 0.1)
    router.place(replace(asked, is_admitted=True), 1.0)
    router.prefill_reported(report("prefill-0", runs(0, 6000), ended=(job,)), 1.1)
    router.prefill_reported(report("prefill-0", runs(0, 6000), running=job, hits=((job, 0),)), 1.6)
    router.prefill_reported(report("prefill-0", ended=(job,)), 7.6)
    assert router.place(request(1, 6000, PREMIUM, **LONG), 8.0).cached_tokens == 5999


@pytest.mark.parametrize("heard_late", [[], [report("prefill-0", runs(0, 6000))]])
def test_nor_is_it_that_of_the_one_that_is_on_its_way_to_the_same_replica(heard_late):
    """Also where a report that was made before it was placed again names the earlier one."""
    router, job = core(prefill=1), JobId("job-0")
    asked = request(0, 6000, PREMIUM, **LONG)
    router.place(asked, 0.0)
    router.prefill_reported(report("prefill-0", runs(0, 6000), running=job, hits=((job, 0),)), 0.1)
    router.place(replace(asked, is_admitted=True), 1.0)
    for its in heard_late:
        router.prefill_reported(its, 1.1)
    router.prefill_reported(report("prefill-0", ended=(job,)), 1.2)
    assert set(router.view.prefill["prefill-0"].jobs) == {job}
    router.prefill_reported(report("prefill-0", runs(0, 6000), running=job, hits=((job, 0),)), 1.6)
    router.prefill_reported(report("prefill-0", ended=(job,)), 7.6)
    assert router.place(request(1, 6000, PREMIUM, **LONG), 8.0).cached_tokens == 5999


def test_what_decode_computes_instead_is_not_cached():
    router = core(prefill=1)
    router.place(request(0, 6000, PREMIUM, **LONG), 0.0)
    router.not_for_prefill(JobId("job-0"))
    assert router.place(request(1, 6000, PREMIUM, **LONG), 1.0).cached_tokens == 0


def test_prompts_that_are_sent_twice_and_taken_back_cost_a_replica_no_trust():
    router, kv = core(prefill=1), {"kv_tokens": 8000}
    router.prefill_reported(report("prefill-0", **kv), 0.0)
    for number in range(30):
        at_s, second = 20.0 * number, JobId(f"job-{number}-second")
        router.place(request(f"{number}-first", 6000, PREMIUM, **LONG), at_s)
        router.place(request(f"{number}-second", 6000, PREMIUM, **LONG), at_s)
        router.job_ended(JobEnded(JobId(f"job-{number}-first")), at_s + 0.1)
        started = {"running": second, "hits": ((second, 0),)}
        router.prefill_reported(
            report("prefill-0", runs(f"{number}-second", 6000), **started, **kv), at_s + 0.2
        )
        router.job_ended(JobEnded(second), at_s + 0.3)
        router.prefill_reported(report("prefill-0", ended=(second,), **kv), at_s + 0.4)
        router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), at_s + 0.4)
    router.place(request("last", 6000, PREMIUM, **LONG), 600.0)
    assert router.view.prefixes.tokens_of(ReplicaId("prefill-0")) == 6000


def test_texts_that_begin_with_fewer_tokens_than_they_seem_to_cost_a_replica_no_trust():
    router, kv = core(prefill=1), {"kv_tokens": 1500}
    for number in range(20):
        at_s, job = 5.0 * number, JobId(f"job-{number}")
        router.place(replace(request(number, None, PREMIUM, **LONG), prompt_bytes=6000), at_s)
        hits = ((job, 900 if number else 0),)
        router.prefill_reported(
            report("prefill-0", runs(number, 1000), running=job, hits=hits, **kv), at_s + 0.1
        )
        router.prefill_reported(report("prefill-0", ended=(job,), **kv), at_s + 1.1)
        router.job_ended(JobEnded(job, 1.2), at_s + 1.2)
        router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), at_s + 1.2)
    assert router.view.prefixes.tokens_of(ReplicaId("prefill-0")) == 1500
