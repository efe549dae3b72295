"""What waits on a replica, and the choice of its next step in short."""

import math

from prefill_node.board.messages import Queued
from prefill_node.engine.stepping.memory import NOTHING_ELSE
from prefill_node.engine.stepping.step_choice import ChoiceRules, Resume, Start, Wait, choose
from prefill_node.engine.stepping.suspension import Suspended, SuspendedStep
from slo.predict.prefill_time import PrefillPredictor
from slo.queue.fairness import Boost, Fairness
from slo.queue.order import QueueOrder
from slo.queue.prefill import Prefill
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId
from slo.tiers import DEFAULT_TIERS, PREMIUM

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
PLENTY = 1000


def rules(join_tokens=1, order=QueueOrder.SEDF, fairness=None):
    return ChoiceRules(order, LINE, join_tokens, fairness=fairness)


def having_led(*leads):
    """The account of a replica that has served premium; classes that have led may not lead again."""
    made = Fairness(DEFAULT_TIERS)
    made.step_ended({PREMIUM: 1}, 100.0, 0.0)
    for tier in leads:
        made.step_ended({tier: 1}, 1.0, 0.0, Boost(tier, math.inf, counts=1e6))
    return made


def queued(name, tokens=100, deadline_s=NO_DEADLINE, weight=1.0, missing=1, held=0, arrived_s=0.0):
    prefill = Prefill(JobId(name), weight, deadline_s, LINE.prefill_s(tokens), arrived_s)
    return Queued(prefill, tokens, 0.0, missing, held, name, held > 0)


def step_of(number, since_s=0.0, tokens=100):
    return SuspendedStep(number, {f"of-{number}": tokens}, 0.0, 5, 0.5, 1000, since_s, "", 0.0)


def suspended(
    number, tokens=100, deadline_s=NO_DEADLINE, weight=1.0, held=1, since_s=0.0, arrived_s=0.0, **flags
):
    step = step_of(number, since_s, tokens)
    prefill = Prefill(JobId(f"step:{number}"), weight, deadline_s, LINE.prefill_s(tokens), arrived_s)
    return Suspended(step, prefill, held, **flags)


def chosen(queue=(), stopped=(), free=PLENTY, memory=NOTHING_ELSE, **rest):
    """In short: the names that start and what is given up for them, the number of the step that goes on."""
    match choose(list(queue), list(stopped), free, 0.0, rules(**rest), memory=memory):
        case Start(requests, drop_steps, drop_requests):
            return [*requests], [*(step.step_id for step in drop_steps), *drop_requests]
        case Resume(step):
            return step.step_id
        case Wait():
            return None


def starts(*names):
    return [*names], []
