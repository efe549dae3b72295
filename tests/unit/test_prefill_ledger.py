from prefill_node.ledger import Accepted, PrefillLedger
from slo.predictor import PrefillPredictor
from slo.request import JobId
from slo.slack import NO_DEADLINE
from slo.tiers import Tier

LINE = PrefillPredictor(0.001, 0.0)


def job(name, tokens=100, deadline_s=NO_DEADLINE, arrived_s=0.0):
    return Accepted(JobId(name), Tier.STANDARD, tokens, deadline_s, arrived_s)


def test_the_first_arrival_runs_and_the_next_waits():
    ledger = PrefillLedger(LINE)
    ledger.arrived(job("a"), 1.0)
    ledger.arrived(job("b"), 2.0)
    assert (ledger.running, ledger.running_since_s) == ("a", 1.0)


def test_the_most_urgent_waiting_one_runs_next():
    ledger = PrefillLedger(LINE)
    for name, deadline_s in (("a", NO_DEADLINE), ("b", NO_DEADLINE), ("c", 9.0), ("d", 5.0)):
        ledger.arrived(job(name, deadline_s=deadline_s), 0.0)
    ledger.ended(JobId("a"), 1.0)
    assert (ledger.running, ledger.running_since_s) == ("d", 1.0)


def test_ends_are_reported_once():
    ledger = PrefillLedger(LINE)
    ledger.arrived(job("a"), 0.0)
    ledger.ended(JobId("a"), 1.0)
    ledger.ended(JobId("a"), 2.0)
    ledger.ended(JobId("never-here"), 2.0)
    assert ledger.take_ended() == ("a",)
    assert ledger.take_ended() == ()
    assert ledger.running is None
