"""Slack, and the order that it puts requests in.

Slack is what is left of a request's budget once its predicted work is done. All times are seconds on one
clock of one host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

NO_DEADLINE = math.inf
"""The deadline of a request that has none: it has infinite slack and never misses."""


def slack_s(deadline_s: float, now_s: float, predicted_remaining_s: float) -> float:
    """Seconds to spare if the remaining work starts now; negative when the deadline will be missed.

    Only the work still to do counts, so that a request keeps the credit for what it has done.
    """
    return deadline_s - now_s - predicted_remaining_s


class SlackRank(NamedTuple):
    """Sort key of a waiting request; smaller goes first.

    Attributes:
        group: 0 for feasible requests, 1 for infeasible ones, 2 for those without a deadline: an infeasible
            request has been promised something, one without a deadline has not.
        order: Within the group, the deadline; among infeasible requests, minus the distance to it.
        arrival_s: First come, first served among equals.
    """

    group: int
    order: float
    arrival_s: float


def sedf_rank(deadline_s: float, now_s: float, predicted_remaining_s: float, arrival_s: float) -> SlackRank:
    """Slack-aware earliest deadline first (S-EDF, FlowPrefill, arXiv 2602.16603, section 4).

    S-EDF's priority is sign(slack) / |deadline - now|, larger first. The rank is in the same order: for
    positive slack the earliest deadline leads, for negative slack the farthest. The rank of a feasible
    request does not change with time. Requests without a deadline, which S-EDF does not know, come last.
    """
    if math.isinf(deadline_s):
        return SlackRank(2, 0.0, arrival_s)
    if slack_s(deadline_s, now_s, predicted_remaining_s) >= 0:
        return SlackRank(0, deadline_s, arrival_s)
    return SlackRank(1, -abs(deadline_s - now_s), arrival_s)
