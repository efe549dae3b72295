"""A fleet that does a second of work in a second, with the router's admission and the monitor that steers it.

The server is a fluid model; who is admitted, what counts as missed and what is shed are the real rules.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, replace

from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRequest, AdmissionRules
from slo.admission.tenant_limits import TenantGates, Usage
from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand
from slo.errors import RejectionReason
from slo.monitor.core import MonitorCore
from slo.monitor.messages import IngressSeen, MonitorReport, Role, RouterSeen
from slo.monitor.settings import MonitorSettings
from slo.outcomes import Outcome, RequestEnded, outcome_of
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, STANDARD

_TICK_S = 0.1


@dataclass(frozen=True)
class Stream:
    """Requests of a tier: so many a second, of so much work each, a part of which fails; the answers take
    so long."""

    per_s: float
    work_s: float
    fails: float = 0.0
    lasts_s: float = 0.0


class SteeredFleet:
    """Serves by tier, of background its share before standard; or in the order of arrival.

    Args:
        in_order: Whether what has come first is served first, whatever its tier.
        slow: The part of what is served that is late whatever waits.
        streams: How many answers at a time keep the pace of the strictest objective on a decode replica; None
            for any number.

    Attributes:
        fates: How many were admitted, or refused and why, by tier and by what became of them.
        steps: Each change of the policy: when, shed levels, and the reservation.
        late_s: By tier, when those ended that missed their objective.
        decode_replicas: How many there are from now on.
    """

    def __init__(self, *, in_order=False, slow=0.0, streams=None):
        self._random = random.Random(1)
        self.admission = AdmissionController(
            DEFAULT_TIERS, AdmissionRules(), TenantGates(), self._random.random
        )
        self.admission.capacity_changed(1.0, 0.0)
        self.monitor = MonitorCore(MonitorSettings(models=("m",)), 0.0)
        self._queues = {tier: deque() for tier in ([STANDARD] if in_order else DEFAULT_TIERS.names)}
        self._in_order, self._slow, self._streams = in_order, slow, streams
        self._decoding, self.decode_replicas = [], 1
        self._asked, self._number, self._second = Counter(), 0, 0
        self.fates, self.steps = Counter(), []
        self.late_s = {tier: [] for tier in DEFAULT_TIERS.names}

    def run(self, seconds, **streams):
        """Go on for so long, with these streams by tier."""
        for _ in range(seconds):
            self._second += 1
            ended = []
            for tick in range(round(1 / _TICK_S)):
                now_s = self._second + tick * _TICK_S
                for tier, stream in streams.items():
                    self._asked[tier] += stream.per_s * _TICK_S
                    while self._asked[tier] >= 1:
                        self._asked[tier] -= 1
                        ended += self._ask(tier, stream, now_s)
                ended += self._serve(now_s) + self._decode(now_s)
            self._report(tuple(ended), float(self._second))

    @property
    def waits_s(self):
        """The work that waits."""
        return sum(request[1] for queue in self._queues.values() for request in queue)

    def _ask(self, tier, stream, now_s):
        self._number += 1
        job, refused = JobId(f"{self._number}"), None
        decision = self.admission.decide(AdmissionRequest(job, tier, tier, Usage(1), stream.work_s), now_s)
        if decision is not None:
            refused = decision.reason
        elif tier == STANDARD and sum(left_s for _, left_s, *_ in self._queues[tier]) > 0.5:
            self.admission.withdrawn(job, now_s)
            refused = RejectionReason.DEADLINE_INFEASIBLE
        self.fates[tier, refused] += 1
        if refused is None:
            queue = self._queues[STANDARD if self._in_order else tier]
            fails = self._random.random() < stream.fails
            queue.append([job, stream.work_s, tier, now_s, fails, stream.lasts_s])
            return []
        return [self._ended(tier, outcome_of(refused))]

    def _serve(self, now_s):
        left_s, ended = _TICK_S, []
        turns = [(tier, _TICK_S) for tier in self._queues]
        if not self._in_order:
            turns.insert(1, (BACKGROUND, DEFAULT_TIERS[BACKGROUND].share * _TICK_S))
        for tier, most_s in turns:
            queue, may_s = self._queues[tier], min(left_s, most_s)
            while queue and may_s > 1e-9:
                took_s = min(may_s, queue[0][1])
                queue[0][1] -= took_s
                may_s, left_s = may_s - took_s, left_s - took_s
                if queue[0][1] <= 1e-9:
                    ended += self._served(*queue.popleft(), now_s)
        return ended

    def _served(self, job, _, tier, asked_s, fails, lasts_s, now_s):
        self.admission.served(job)
        if fails:
            self.admission.ended(job, now_s)
            return [self._ended(tier, Outcome.FAILED)]
        slow_s = 10.0 if self._random.random() < self._slow else 0.0
        ttft_s = now_s - asked_s + slow_s
        if lasts_s:
            self._decoding.append((now_s + lasts_s, job, tier, ttft_s))
            return []
        return [self._finished(job, tier, now_s, ttft_s)]

    def _decode(self, now_s):
        """Those that are at their end; the pace of an answer is the one at which that comes."""
        over = [stream for stream in self._decoding if stream[0] <= now_s]
        part = self._decode_load
        self._decoding = [stream for stream in self._decoding if stream[0] > now_s]
        strictest_s = min(policy.tpot_s for policy in DEFAULT_TIERS.values() if policy.tpot_s is not None)
        return [self._finished(job, tier, now_s, ttft_s, part * strictest_s) for _, job, tier, ttft_s in over]

    @property
    def _decode_load(self):
        return len(self._decoding) / self._streams / self.decode_replicas if self._streams else 0.0

    def _finished(self, job, tier, now_s, ttft_s, tpot_s=None):
        self.admission.ended(job, now_s)
        ended = self._ended(tier, Outcome.FINISHED, ttft_s, tpot_s)
        if ended.attained is False:
            self.late_s[tier].append(now_s)
        return ended

    @staticmethod
    def _ended(tier, outcome, ttft_s=None, tpot_s=None):
        policy = DEFAULT_TIERS[tier]
        tpot_budget_s = None if tpot_s is None else policy.tpot_s
        return RequestEnded(
            "m",
            tier,
            tier,
            outcome,
            1.0,
            ttft_s=ttft_s,
            ttft_budget_s=policy.ttft_s,
            tpot_s=tpot_s,
            tpot_budget_s=tpot_budget_s,
        )

    def _report(self, ended, now_s):
        monitor, settings = self.monitor, self.monitor.settings
        seen = IngressSeen(ended)
        monitor.heard(MonitorReport("i", Role.INGRESS, 0, seen, settings=settings, model="m"), now_s)
        work, backlog_s = self.admission.demand(now_s)
        refused = self.admission.refused_work(now_s)
        prefill = PrefillDemand(work, backlog_s, capacity=self.admission.capacity, refused=refused)
        decode = DecodeDemand(0.05, 1, 0.0, 1)
        if self._streams:
            decode = DecodeDemand(
                0.05, len(self._decoding), self._decode_load * self.decode_replicas, self.decode_replicas
            )
        self.admission.decode.sees(decode)
        decode = replace(decode, asked=self.admission.decode.replicas_asked(now_s))
        demand = FleetDemand(prefill, decode)
        monitor.heard(MonitorReport("r", Role.ROUTER, 0, RouterSeen({}, {}, demand), model="m"), now_s)
        monitor.look(now_s)
        policy = monitor.policy
        told = {tier: level for tier, level in policy.shed.items() if level}, policy.reserved
        if told != (self.steps[-1][1:] if self.steps else ({}, 0.0)):
            self.steps.append((now_s, *told))
        self.admission.follow(policy.shed, policy.reserved)
