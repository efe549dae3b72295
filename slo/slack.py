"""Slack, and the order that it puts requests in.

Slack is what is left of a request's budget once its predicted work is done. All times are seconds on one
clock of one host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

NO_DEADLINE = math.inf
"""The deadline of a request that has none: it has infinite slack and never misses."""

_ON_THE_DEADLINE_S = 1e-6


def slack_s(deadline_s: float, now_s: float, predicted_remaining_s: float) -> float:
    """Seconds to spare if the remaining work starts now; negative when the deadline will be missed.

    Only the work still to do counts, so that a request keeps the credit for what it has done.
    """
    return deadline_s - now_s - predicted_remaining_s


class SlackRank(NamedTuple):
    """Sort key of a waiting request; smaller goes first.

    Attributes:
        urgency: Minus sign(slack) / |time to deadline|: feasible requests come in the order of their
            deadlines, all of them before those that have no deadline, and those before the ones that are
            already lost, where the one that is latest goes last.
        arrival_s: First come, first served among equals.
    """

    urgency: float
    arrival_s: float


def sedf_rank(deadline_s: float, now_s: float, predicted_remaining_s: float, arrival_s: float) -> SlackRank:
    """Slack-aware earliest deadline first (S-EDF, FlowPrefill, arXiv 2602.16603, section 4).

    Priority is sign(slack) / |deadline - now|. A request without a deadline ranks 0, between those that
    can be met and those that cannot.
    """
    if math.isinf(deadline_s):
        return SlackRank(0.0, arrival_s)
    to_deadline_s = max(abs(deadline_s - now_s), _ON_THE_DEADLINE_S)
    sign = 1.0 if slack_s(deadline_s, now_s, predicted_remaining_s) >= 0 else -1.0
    return SlackRank(-sign / to_deadline_s, arrival_s)
