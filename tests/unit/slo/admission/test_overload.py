"""Ten times what a fleet can do for twenty minutes, in virtual time, and what is left a minute later."""

import itertools
import random
from collections import deque
from typing import ClassVar

import pytest

from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRequest, AdmissionRules
from slo.admission.tenant_limits import TenantGates, Usage
from slo.errors import Rejected, RejectionReason
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

WORK_S = 0.1
OVERLOAD_S = 1200.0
BACKLOG_S = AdmissionRules().max_late_backlog_s
MIXED = [PREMIUM, STANDARD, STANDARD, BACKGROUND]


class Fleet:
    """One replica that serves what was admitted, in the order of tiers.

    Args:
        due_s: With an objective the youngest that can be on time comes first, and those that cannot last.
    """

    def __init__(self, due_s=None):
        self.due_s = due_s
        rules = AdmissionRules()
        self.admission = AdmissionController(DEFAULT_TIERS, rules, TenantGates(), random.Random(1).random)
        self.admission.capacity_changed(1.0, 0.0)
        self.queues = {tier: deque() for tier in DEFAULT_TIERS.names}
        self.free_at_s = 0.0
        self.waits_s = {tier: [] for tier in DEFAULT_TIERS.names}
        self.refused = dict.fromkeys(DEFAULT_TIERS.names, 0)
        self.most = self.asked = 0

    def offer(self, tiers, load, from_s, until_s):
        """Requests of `tiers`, one after the other, at so many times the capacity."""
        at_s = from_s
        while at_s < until_s:
            self.ask(tiers[(self.asked + 1) % len(tiers)], at_s)
            at_s += WORK_S / load

    def ask(self, tier, at_s, tenant="a"):
        """One request; whether it was admitted."""
        self._serve(at_s)
        self.asked += 1
        job = JobId(f"{self.asked}")
        decision = self.admission.decide(AdmissionRequest(job, tier, tenant, Usage(100), WORK_S), at_s)
        if isinstance(decision, Rejected):
            self.refused[tier] += 1
            assert decision.reason is not RejectionReason.CONCURRENCY
        else:
            self.queues[tier].append((job, at_s))
        self.most = max(self.most, sum(map(len, self.queues.values())))
        return not isinstance(decision, Rejected)

    def _serve(self, now_s):
        while self.free_at_s <= now_s:
            queue = next((self.queues[tier] for tier in DEFAULT_TIERS.names if self.queues[tier]), None)
            if queue is None:
                self.free_at_s = now_s
                return
            job, asked_s = self._next(queue)
            self.waits_s[next(t for t in self.queues if self.queues[t] is queue)].append(
                (max(asked_s, self.free_at_s) - asked_s, asked_s)
            )
            self.free_at_s = max(self.free_at_s, asked_s) + WORK_S
            self.admission.served(job)
            self.admission.ended(job, self.free_at_s)

    def _next(self, queue):
        if self.due_s is not None and queue[-1][1] + self.due_s > self.free_at_s + WORK_S:
            return queue.pop()
        return queue.popleft()


class LateLast(Fleet):
    """As replicas order their queues: what can be on time, premium before standard, then what is late."""

    DUE_S: ClassVar = {PREMIUM: 2.0, STANDARD: 4.0}

    def _serve(self, now_s):
        while self.free_at_s <= now_s:
            for tier, due_s in self.DUE_S.items():
                queue = self.queues[tier]
                if queue and queue[-1][1] + due_s > self.free_at_s + WORK_S:
                    self._run(tier, queue.pop())
                    break
            else:
                tier = next((tier for tier in self.queues if self.queues[tier]), None)
                if tier is None:
                    self.free_at_s = now_s
                    return
                self._run(tier, self.queues[tier].popleft())

    def _run(self, tier, asked):
        job, asked_s = asked
        self.waits_s[tier].append((max(asked_s, self.free_at_s) - asked_s, asked_s))
        self.free_at_s = max(self.free_at_s, asked_s) + WORK_S
        self.admission.served(job)
        self.admission.ended(job, self.free_at_s)


def test_while_premium_waits_for_its_late_ones_nobody_passes_them():
    """Ten times the load of premium and then of all: premium is not kept out while standard is let in."""
    fleet = LateLast()
    fleet.offer([PREMIUM], 10.0, 0.0, 300.0)
    fleet.offer(MIXED, 10.0, 300.0, 600.0)
    served_s = sorted(asked_s + wait_s for wait_s, asked_s in fleet.waits_s[PREMIUM])
    pauses_s = [later - sooner for sooner, later in itertools.pairwise(served_s)]
    assert max(pauses_s) < 10.0
    assert max(wait_s for wait_s, _ in fleet.waits_s[PREMIUM]) < BACKLOG_S + 10.0
    backlog_s = fleet.admission.backlog_s(STANDARD)
    assert backlog_s <= DEFAULT_TIERS[STANDARD].share * AdmissionRules().calm_s + WORK_S, (
        "and few wait in vain"
    )


@pytest.mark.parametrize("tier", [PREMIUM, BACKGROUND])
@pytest.mark.parametrize("order", [Fleet, LateLast])
def test_a_tenant_that_fills_a_queue_keeps_no_other_out(order, tier):
    """One asks for four times and for twenty times what the fleet can do, the other for three hundredths."""
    fleet = order()
    arrivals = [(number * WORK_S / load, "hog") for load in (4.0, 20.0) for number in range(int(3000 * load))]
    arrivals = sorted([*arrivals, *((number * WORK_S / 0.03, "small") for number in range(90))])
    admitted = {"hog": 0, "small": 0}
    for at_s, tenant in arrivals:
        admitted[tenant] += fleet.ask(tier, at_s, tenant)
    assert admitted["small"] == 90
    assert admitted["hog"] > 0.9 * 2900, "and the rest is the other's"
    assert fleet.most * WORK_S < 2 * AdmissionRules().max_backlog_s
    if tier == PREMIUM:
        longest_s = max(wait_s for wait_s, _ in fleet.waits_s[PREMIUM])
        assert longest_s < BACKLOG_S + AdmissionRules().calm_s + 1, "nobody is left behind"


def test_many_tenants_together_do_not_fill_a_queue_for_good():
    """Each has next to nothing in it, and all ask for four times what the fleet can do."""
    fleet = LateLast()
    for number in range(int(4 * 300 / WORK_S)):
        fleet.ask(PREMIUM, number * WORK_S / 4, f"tenant-{number % 100}")
    assert fleet.most * WORK_S < 2 * BACKLOG_S + 1
    assert max(wait_s for wait_s, _ in fleet.waits_s[PREMIUM]) < 2 * BACKLOG_S + 10.0
    backlog_s = fleet.admission.backlog_s(PREMIUM)
    assert backlog_s < AdmissionRules().calm_s + 100 * WORK_S


@pytest.mark.parametrize("tiers", [[PREMIUM], MIXED], ids=["all premium", "mixed"])
@pytest.mark.parametrize("due_s", [None, 2.0], ids=["in order", "on time first"])
def test_an_overload_is_refused_and_forgotten(tiers, due_s):
    fleet = Fleet(due_s)
    fleet.offer(tiers, 10.0, 0.0, OVERLOAD_S)
    most_s = BACKLOG_S + sum(AdmissionRules().max_backlog_s for tier in {*tiers} - {PREMIUM})
    assert fleet.most * WORK_S < most_s + 1, "what waits is bounded"
    assert sum(fleet.refused.values()) > 0.8 * fleet.asked
    waits_s = sorted(wait_s for wait_s, _ in fleet.waits_s[PREMIUM])
    assert waits_s[-1] < BACKLOG_S + AdmissionRules().calm_s + 1, "nobody is left behind"
    if due_s is not None:
        assert waits_s[int(0.6 * len(waits_s))] < due_s, "and most are on time for it"
    fleet.offer(tiers, 0.65, OVERLOAD_S, OVERLOAD_S + 10)
    refused_before = dict(fleet.refused)
    fleet.offer(tiers, 0.65, OVERLOAD_S + 10, OVERLOAD_S + 180)
    assert fleet.refused[PREMIUM] == refused_before[PREMIUM], "the queue is full for a moment more"
    late = [wait_s for wait_s, asked_s in fleet.waits_s[PREMIUM] if asked_s > OVERLOAD_S + 60]
    assert late
    assert max(late) < 1.0, "premium is as it was a minute later"
    assert len(fleet.admission._jobs) < 20, "and nothing is kept of the rest"
