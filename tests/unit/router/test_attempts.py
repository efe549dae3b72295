"""Which end of a prefill counts that was lost or placed again."""

import pytest
from small_router import admitted, placed_again, report, request, runs

from router import attempts
from router.attempts import Attempts
from router.messages import JobEnded
from slo.reports import ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import PREMIUM


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_prefill_that_ended_with_its_replica_is_no_backlog(is_silent, is_named):
    router, admission = admitted("a")
    router.place(request(1, 1000, PREMIUM), 0.0)
    if is_named:
        router.prefill_reported(report("a", runs(1, 1000)), 0.1)
    if not is_silent:
        router.replica_gone(ReplicaGone(ReplicaId("a")), 1.0)
    router.prefill_reported(report("b"), 4.0)
    assert admission.backlog_s(PREMIUM) == 1.0, "it may yet ask for another place"
    for at_s in range(5, 50 if is_silent else 8):
        router.prefill_reported(report("b"), float(at_s))
    assert admission.backlog_s(PREMIUM) == 0.0


def test_a_lost_prefill_that_is_placed_again_is_backlog_until_it_ends():
    router, admission = admitted("a", "b")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    router.replica_gone(ReplicaGone(first), 1.0)
    other = router.place(placed_again(1, 1000, first), 3.0).prefill_replica
    for at_s in range(3, 60):
        router.prefill_reported(report(other, runs(1, 1000)), float(at_s))
    assert admission.backlog_s(PREMIUM) == 1.0
    router.prefill_reported(report(other, ended=(JobId("job-1"),)), 60.0)
    assert admission.backlog_s(PREMIUM) == 0.0


def test_the_end_of_an_earlier_attempt_is_not_that_of_the_prefill():
    router, admission = admitted("a", "b")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    router.prefill_reported(report(first, runs(1, 1000)), 0.1)
    other = router.place(placed_again(1, 1000, first), 3.0).prefill_replica
    assert other != first
    router.prefill_reported(report(first, ended=(JobId("job-1"),)), 4.0)
    assert admission.backlog_s(PREMIUM) == 1.0
    router.prefill_reported(report(other, ended=(JobId("job-1"),)), 5.0)
    assert admission.backlog_s(PREMIUM) == 0.0


@pytest.mark.parametrize("comes", [True, False])
def test_nor_is_it_where_the_prefill_is_on_its_way_to_the_same_replica(comes):
    router, admission = admitted("a")
    router.place(request(1, 1000, PREMIUM), 0.0)
    router.prefill_reported(report("a", runs(1, 1000)), 0.1)
    router.place(placed_again(1, 1000), 1.0)
    router.prefill_reported(report("a", ended=(JobId("job-1"),)), 1.1)
    assert admission.backlog_s(PREMIUM) == 1.0
    for at_s in range(2, 6):
        router.prefill_reported(report("a", *([runs(1, 1000)] if comes else [])), float(at_s))
        assert admission.backlog_s(PREMIUM) == 1.0
    router.prefill_reported(report("a", ended=(JobId("job-1"),) if comes else ()), 7.0)
    assert admission.backlog_s(PREMIUM) == 0.0


def test_two_attempts_that_have_both_ended_on_a_replica_are_no_backlog():
    router, admission = admitted("a")
    router.place(request(1, 1000, PREMIUM), 0.0)
    router.prefill_reported(report("a", runs(1, 1000)), 0.1)
    router.place(placed_again(1, 1000), 1.0)
    router.prefill_reported(report("a", ended=(JobId("job-1"), JobId("job-1"))), 1.1)
    assert admission.backlog_s(PREMIUM) == 0.0
    assert not router.view.prefill["a"].jobs


def test_where_the_router_placed_it_again_in_vain_its_end_elsewhere_is_that_of_the_prefill():
    router, admission = admitted("a", "b", "c")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    router.prefill_reported(report(first, runs(1, 1000)), 0.1)
    told = router.place(placed_again(1, 1000, first), 1.0).prefill_replica
    router.prefill_reported(report(first, ended=(JobId("job-1"),)), 1.0)
    assert admission.backlog_s(PREMIUM) == 1.0
    (chosen,) = {"a", "b", "c"} - {first, told}
    router.prefill_reported(report(chosen, runs(1, 1000)), 1.1)
    router.prefill_reported(report(chosen, ended=(JobId("job-1"),)), 2.1)
    assert admission.backlog_s(PREMIUM) == 0.0


def test_nor_does_it_wait_where_the_chosen_replica_is_done_between_two_reports():
    router, admission = admitted("a", "b", "c")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    told = router.place(placed_again(1, 1000, first), 1.0).prefill_replica
    (chosen,) = {"a", "b", "c"} - {first, told}
    router.prefill_reported(report(chosen, ended=(JobId("job-1"),)), 1.9)
    for at_s in range(2, 8):
        for name in (first, told, chosen):
            router.prefill_reported(report(name), float(at_s))
    assert admission.backlog_s(PREMIUM) == 0.0


def test_a_replica_that_stalled_does_not_bring_back_a_prefill_that_is_done():
    router, admission = admitted("a", "b")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    other = router.place(placed_again(1, 1000, first), 2.6).prefill_replica
    router.prefill_reported(report(other, runs(1, 1000)), 2.7)
    router.prefill_reported(report(other, ended=(JobId("job-1"),)), 4.0)
    router.prefill_reported(report(first, runs(1, 1000)), 4.5)
    router.prefill_reported(report(first, ended=(JobId("job-1"),)), 4.6)
    assert admission.backlog_s(PREMIUM) == 0.0


def test_what_is_placed_again_after_its_end_is_not_kept(monkeypatch):
    monkeypatch.setattr(attempts, "REMEMBERED", 10)
    router, admission = admitted("a", "b")
    places = []
    for number in range(50):
        first = router.place(request(number, 10, PREMIUM), 0.0).prefill_replica
        router.job_ended(JobEnded(JobId(f"job-{number}")), 0.0)
        other = router.place(placed_again(number, 10, first), 0.0).prefill_replica
        places.append((first, other))
    left_s = {}
    for number in (0, 39, 40, 49):
        first, other = places[number]
        router.prefill_reported(report(other, runs(number, 10)), 0.1)
        router.prefill_reported(report(first, ended=(JobId(f"job-{number}"),)), 0.2)
        left_s[number] = admission.backlog_s(PREMIUM)
        router.job_ended(JobEnded(JobId(f"job-{number}")), 0.3)
    assert left_s == {0: 0, 39: 0, 40: pytest.approx(0.01), 49: pytest.approx(0.01)}, "the latest are"


def test_the_same_prefill_placed_many_times_is_remembered_once():
    books = Attempts(lambda job_id: [ReplicaId("c")], in_transit_s=5.0)
    books.placed_again(JobId("other"), ReplicaId("b"))
    for _ in range(2 * attempts.REMEMBERED):
        books.placed_again(JobId("job"), ReplicaId("b"))
    both = {JobId("job"), JobId("other")}
    assert books.ended(both, ReplicaId("a"), 0.0) == set()
    assert books.ended(both, ReplicaId("b"), 0.0) == both
    books.forget(JobId("job"))
    assert books.ended(both, ReplicaId("a"), 0.0) == {JobId("job")}


def test_a_lost_prefill_is_given_up_once_and_only_without_a_replica():
    placed = {JobId("placed")}
    books = Attempts(lambda job_id: [ReplicaId("a")] if job_id in placed else [], in_transit_s=5.0)
    books.lost([JobId("placed"), JobId("gone")], 0.0)
    books.lost([JobId("later")], 1.0)
    assert books.given_up(4.9) == []
    assert books.given_up(5.0) == [JobId("gone")]
    assert books.given_up(9.0) == [JobId("later")]
    assert books.given_up(99.0) == []


def test_a_prefill_that_is_lost_once_more_keeps_nobody_else_waiting():
    one, two = JobId("job-1"), JobId("job-2")
    attempts = Attempts(lambda _: [], 5.0)
    attempts.lost([one], 0.0)
    attempts.lost([two], 1.0)
    attempts.lost([one], 4.0)
    assert attempts.given_up(6.5) == [two]
    assert attempts.given_up(9.5) == [one]


def test_a_prefill_that_is_done_again_waits_again_but_not_since_it_came():
    router, admission = admitted("a", "b")
    first = router.place(request(1, 1000, PREMIUM), 0.0).prefill_replica
    router.prefill_reported(report(first, ended=(JobId("job-1"),)), 1.0)
    assert admission.backlog_s(PREMIUM) == 0.0
    for name in ("a", "b"):
        router.prefill_reported(report(name), 299.0)
    other = router.place(placed_again(1, 1000, first), 300.0).prefill_replica
    router.prefill_reported(report(other, runs(1, 1000)), 300.1)
    assert admission.backlog_s(PREMIUM) == 1.0
    assert admission._backlog.oldest(PREMIUM).admitted_s == 300.1
    router.prefill_reported(report(other), 301.0)
    assert admission.backlog_s(PREMIUM) == 0.0
