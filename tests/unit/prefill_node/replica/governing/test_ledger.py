"""What has arrived is kept until it ends, and each end is reported once."""

from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId
from slo.tiers import STANDARD

LINE = PrefillPredictor(0.001, 0.0)


def job(name, tokens=100, deadline_s=NO_DEADLINE):
    return Accepted(JobId(name), STANDARD, tokens, deadline_s, 0.0)


def ledger(*names):
    started = PrefillLedger(LINE)
    for name in names:
        started.arrived(job(name))
    return started


def test_what_has_arrived_is_kept_until_it_ends():
    two = ledger("a", "b")
    two.ended(JobId("a"))
    assert two.accepted == {"b": job("b")}


def test_ends_are_reported_once_in_their_order():
    three = ledger("a", "b", "c")
    three.ended(JobId("b"))
    three.ended(JobId("a"))
    three.ended(JobId("a"))
    three.ended(JobId("never-here"))
    assert three.take_ended() == ("b", "a")
    assert three.take_ended() == ()
    three.ended(JobId("c"), abandoned=True)
    assert three.take_ended() == ("c",), "however it ended"


def test_what_waits_for_a_place_is_kept_apart_until_it_has_one_or_leaves():
    one = ledger("a")
    one.came(job("b"))
    one.came(job("c"))
    assert (list(one.accepted), list(one.without_place)) == (["a"], ["b", "c"])
    one.arrived(job("b"))
    for name in "abc":
        one.stopped_waiting(JobId(name))
    assert (list(one.accepted), list(one.without_place)) == (["a", "b"], [])
    assert one.take_ended() == ("c",), "the others have a place"
    assert not one.abandoned


def test_those_whose_clients_left_are_remembered():
    two = ledger("a", "b")
    two.ended(JobId("a"), abandoned=True)
    two.ended(JobId("b"))
    assert list(two.abandoned) == ["a"]


def test_a_client_that_leaves_after_the_answer_has_abandoned_nothing():
    one = ledger("a")
    one.ended(JobId("a"))
    one.ended(JobId("a"), abandoned=True)
    one.ended(JobId("never-here"), abandoned=True)
    assert not one.abandoned


def test_only_so_many_are_remembered_the_latest_of_them():
    started = ledger()
    for n in range(10_000):
        started.arrived(job(f"job-{n}"))
        started.ended(JobId(f"job-{n}"), abandoned=True)
    assert len(started.abandoned) < 5_000
    assert "job-9999" in started.abandoned
    assert "job-0" not in started.abandoned
    assert started.accepted == {}
