"""Governors without a board, and the jobs that they know."""

from published import Engine

from prefill_node.board.messages import Reached
from prefill_node.replica.governing.governor import ForwardProfile, Governor
from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from slo.predict.pass_shape import PassShape
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import Limits, PreemptionMode, PreemptionRules
from slo.queue.order import QueueOrder
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
NOTHING_REACHED = Reached(0, 0)
BOUNDARIES = 10
BYTES_PER_TOKEN = 100
ENGINE = Engine()


def job(name, tokens=100, deadline_s=NO_DEADLINE, tier=BACKGROUND, arrived_s=0.0):
    return ENGINE.knows(Accepted(JobId(name), tier, tokens, deadline_s, arrived_s))


def ledger_of(*jobs, predictor=LINE):
    ledger = PrefillLedger(predictor)
    for each in jobs:
        ledger.arrived(each)
    return ledger


def governor_of(ledger, rules, boundaries=BOUNDARIES, order=QueueOrder.SEDF):
    """One whose pass has so many boundaries, evenly spread."""
    profile = ForwardProfile(PassShape.even(boundaries), (BYTES_PER_TOKEN,) * boundaries)
    return Governor(ledger, DEFAULT_TIERS.weights, rules, order, profile)


def governor(*jobs, mode=PreemptionMode.RESUME, boundaries=BOUNDARIES, order=QueueOrder.SEDF, **limits):
    """One with these jobs, which `ENGINE` knows, too."""
    rules = PreemptionRules(mode=mode, margin=1.5, limits=Limits(**limits))
    return governor_of(ledger_of(*map(ENGINE.knows, jobs)), rules, boundaries, order)


view = ENGINE.view
LONG = job("long", 1000)
URGENT = job("urgent", 100, deadline_s=0.5, tier=PREMIUM)
CURVE = PrefillPredictor(per_token_s=0.001, fixed_s=0.01, per_pair_s=1e-6)


def curved(*jobs):
    curved = governor(*jobs)
    curved.ledger.predictor = CURVE
    return curved


def names(prefills):
    return [prefill.job_id for prefill in prefills]
