"""Which requests are admitted to a fleet that cannot serve all of them, decided before anything is queued.

Owns the account of what was admitted, and who is refused. How much of the fleet is whose is divided in
`slo.admission.sharing`. Whether one request can meet its deadline is decided in `router.core`, the order of
admitted requests in `slo.queue.order`.

Reads no clock and has no randomness of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Final

from slo.admission.backlog import Backlog, Waiting
from slo.admission.decode_account import DecodeAccount
from slo.admission.demand import RecentDemand
from slo.admission.jobs import AdmittedJob, AdmittedJobs
from slo.admission.parts import HARD_LIMIT
from slo.admission.rules import AdmissionRequest, AdmissionRules
from slo.admission.share_credit import ShareCredit
from slo.admission.sharing import NO_ODDS, Shared, Sharing
from slo.admission.tenant_limits import TenantGate, TenantGates, Usage
from slo.admission.tenants import ANONYMOUS
from slo.errors import Rejected, RejectionReason
from slo.request import JobId
from slo.tiers import SYSTEM, Tier, TierPolicy, TierSet

_REFRESH_S: Final = 0.1
"""How the fleet is divided is as old as this at most."""
_FORGET_AFTER_S: Final = 3600.0
"""A request whose end is not reported for so long counts as ended, if no asker says which of its live."""
_COUNTED_S: Final = 60.0
"""Who has generated an answer whose client has left says within so long how much there was."""
_ASKER_GONE_S: Final = 30.0
"""Who has said for so long nothing of its requests, and asked nothing, is gone, and they with it."""
_SHORT_S: Final = 5.0
"""How long a queue may be in an overload of those that may not be shed, whatever their objective."""


class AdmissionController:
    """Decides for a whole fleet.

    Args:
        tiers: Share of each tier, and whether it may be shed. The top tier, and one that may not be shed, is
            refused for lack of capacity only when its queue is too long; that limit and the tenants' hold for
            every tier but the server's own.
        draw: Draws a number from 0 to below 1, for refusals with a probability.

    Attributes:
        decode: What the classes take of decode; whoever knows tells it how much of that is in use.
    """

    def __init__(
        self,
        tiers: TierSet,
        rules: AdmissionRules,
        tenants: TenantGates,
        draw: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._tenants = tenants
        self._draw = draw
        self._tiers = tiers
        self._sheddable = frozenset(tiers.sheddable)
        self._sharing = Sharing(tiers, rules, tenants.weight)
        self._shared = Shared()
        self._due = frozenset(tier for tier, policy in tiers.items() if policy.has_deadline)
        self._max_backlog_s = {tier: self._longest(policy) for tier, policy in tiers.items()}
        short_s = min(rules.calm_s, _SHORT_S)
        self._max_overload_s = {tier: max(tiers[tier].due_s or 0.0, short_s) for tier in self._due}
        self._never_shed = tuple(tier for tier, policy in tiers.items() if _is_never_shed(policy))
        self._capacity = 0.0
        self._asked_s = -math.inf
        self._demand = RecentDemand(rules.memory_s)
        self._jobs = AdmittedJobs()
        self._uncounted: dict[JobId, tuple[AdmittedJob, float]] = {}
        """Those that have ended without a word of what they took, and when."""
        self._backlog = Backlog(tiers, tenants.weight)
        self.decode = DecodeAccount(tiers)
        self._credit = ShareCredit({tier: tiers[tier].share for tier in self._sheddable})
        self._heard: dict[str, float] = {}
        self._shed: Mapping[Tier, float] = {}
        self._reserved = rules.reserved
        self._refreshed_s = -math.inf

    def decide(self, request: AdmissionRequest, now_s: float) -> Rejected | None:
        """The refusal of a request; None when it is admitted, and then counts as such until it has `ended`.

        One that has been admitted before, and is placed again, is admitted without counting anew. Times never
        go back.
        """
        self._hear(request.asker, now_s)
        if request.job_id in self._jobs:
            return None
        self._forget_old(now_s)
        tier = request.tier
        if tier != SYSTEM:
            gate = self._tenants.of(request.tenant, request.limit)
            if (limit := gate.refusal(request.usage, now_s)) is not None:
                return self._refused(*limit)
            own = None
            if (key := request.key_limit) is not None:
                own = self._tenants.of_key(request.tenant, key)
                if (limit := own.refusal(request.usage, now_s)) is not None:
                    return replace(self._refused(*limit), key_name=key.name)
            if (refused := self._of_the_fleet(request, now_s)) is not None:
                return refused
            for holder in (gate, own):
                if holder is not None:
                    holder.began(request.usage, now_s)
        self._jobs[request.job_id] = AdmittedJob.of(request, now_s)
        self.decode.admitted(request.job_id, tier, request.decode, request.likeness)
        if request.only_decode:
            self.decode.decodes(request.job_id)
        else:
            self._backlog.add(request.job_id, Waiting(tier, request.tenant, request.work_s, now_s))
        return None

    def is_waiting(self, job_id: JobId) -> bool:
        """Whether the prefill of a request counts as waiting."""
        return job_id in self._backlog

    def waits(self, job_id: JobId, tier: Tier, work_s: float, now_s: float) -> None:
        """A replica has the prefill of a request: it counts as waiting, whoever has admitted it.

        Nobody here has when it was admitted before a restart or without an answer of the router, or when its
        prefill was lost and is done again. Whose it is, a replica does not say.
        """
        if self.is_waiting(job_id) or tier not in self._tiers:
            return
        job = self._jobs.get(job_id)
        tenant = ANONYMOUS.name if job is None else job.tenant
        self._backlog.add(job_id, Waiting(tier, tenant, work_s, now_s, is_asked=False))

    def served(self, job_id: JobId) -> None:
        """A prefill has ended, or is not wanted any more; the request may go on."""
        self._backlog.remove(job_id)
        self.decode.decodes(job_id)

    def weight(self, tenant: str) -> float:
        """A tenant's part of what it shares with others, relative to theirs."""
        return self._tenants.weight(tenant)

    def not_for_prefill(self, job_id: JobId) -> None:
        """A request goes on, and the prefill tier has no work with it."""
        self.decode.decodes(job_id)
        if (request := self._backlog.remove(job_id)) is not None and request.is_asked:
            self._demand.withdrawn(request.tier, request.tenant, request.work_s, request.admitted_s)
            self._credit.withdrawn(request.tier, request.work_s)

    def ended(self, job_id: JobId, now_s: float, used: Usage | None = None) -> None:
        """A request has ended, however it did; one that is not known is ignored.

        `used` is what it took of its tenant's tokens; None when who says so does not know: then it counts as
        if it had taken all that it might, until somebody says what was `generated`, or this once more.
        """
        self._backlog.remove(job_id)
        self.decode.ended(job_id, now_s)
        if (job := self._jobs.pop(job_id, None)) is None:
            if used is not None and job_id in self._uncounted:
                self._correct(job_id, used, now_s)
            return
        gates = self._gates_of(job)
        for gate in gates:
            gate.ended(now_s - job.admitted_s, job.usage, job.used if used is None else used, now_s)
        if used is None and any(gate.limit.counts_tokens for gate in gates):
            while self._uncounted and now_s - next(iter(self._uncounted.values()))[1] >= _COUNTED_S:
                del self._uncounted[next(iter(self._uncounted))]
            self._uncounted[job_id] = job, now_s

    def generated(self, job_id: JobId, tokens: int, now_s: float) -> None:
        """So many tokens had been generated for a request when its client left, says who generated them.

        It holds where nothing else says what the request took, whether its end is heard of before or after;
        the most that somebody says, where it had gone on elsewhere.
        """
        if (job := self._jobs.get(job_id)) is not None:
            self._jobs[job_id] = job._replace(used=job.having(tokens))
        elif job_id in self._uncounted:
            self._correct(job_id, self._uncounted[job_id][0].having(tokens), now_s)

    def _correct(self, job_id: JobId, used: Usage, now_s: float) -> None:
        """Somebody says what a request took that has ended without such a word."""
        job, ended_s = self._uncounted[job_id]
        self._uncounted[job_id] = job._replace(used=used), ended_s
        for gate in self._gates_of(job):
            gate.corrected(job.used or job.usage, used, now_s)

    def withdrawn(self, job_id: JobId, now_s: float) -> None:
        """A request that was admitted is not run after all; its tenant is as if it had not come."""
        self.decode.withdrawn(job_id)
        if (request := self._backlog.remove(job_id)) is not None and request.is_asked:
            self._demand.refused(request.work_s, request.admitted_s)
            self._credit.withdrawn(request.tier, request.work_s)
        if (job := self._jobs.pop(job_id, None)) is not None:
            for gate in self._gates_of(job):
                gate.withdrawn(job.usage, now_s)

    def _gates_of(self, job: AdmittedJob) -> tuple[TenantGate, ...]:
        """Those that have counted a request: none of the server's own."""
        if job.tier == SYSTEM:
            return ()
        tenant = self._tenants.of(job.tenant)
        if job.key_name is None:
            return (tenant,)
        return tenant, self._tenants.known_key(job.tenant, job.key_name)

    def reconcile(self, asker: str, asked: int, live: Collection[JobId], now_s: float) -> list[JobId]:
        """End what an asker has no more, and all of those askers that are gone; returns what was ended.

        Args:
            asker: Who says so.
            asked: How many requests it had asked for when it said so; later ones are left alone.
            live: Those of its requests that have not ended.
            now_s: Now.
        """
        self._hear(asker, now_s)
        gone = {name for name, heard_s in self._heard.items() if now_s - heard_s > _ASKER_GONE_S}
        kept = set(live)
        mine = self._jobs.of(asker).items()
        ended = [job_id for job_id, number in mine if number <= asked and job_id not in kept]
        ended += [job_id for name in gone for job_id in self._jobs.of(name)]
        for job_id in ended:
            self.ended(job_id, now_s)
        for name in gone:
            del self._heard[name]
        return ended

    def capacity_changed(self, capacity: float, now_s: float) -> None:
        """From now on the fleet can do so many seconds of prefill work in a second.

        At 0, as without a replica, nobody is refused for a share or a backlog.
        """
        self._credit.passed(self._capacity, now_s)
        self._capacity = capacity

    @property
    def capacity(self) -> float:
        """What the fleet can do, seconds of prefill work in a second, when it was last looked at."""
        return self._capacity

    def came_in_vain(self, now_s: float) -> None:
        """A request has come that the fleet could do nothing with."""
        self._asked_s = now_s

    def follow(self, shed: Mapping[Tier, float], reserved: float) -> None:
        """Apply the monitor's policy until the next one.

        Args:
            shed: By tier, the fraction to refuse of what it asks for above its share, 0 to 1; none of a
                tier that is not there, nor of one that may not be shed. Of a tier that is above its share of
                decode, the fraction of all that it asks for.
            reserved: Fraction of prefill time to keep for the top tier, if that is more than
                `AdmissionRules.reserved`.
        """
        self._shed = dict(shed)
        self._reserved = max(reserved, self._rules.reserved)
        self._refreshed_s = -math.inf

    def load(self, now_s: float) -> float:
        """Work that arrives per second for the fleet to do, over what it can do in a second."""
        self._refresh(now_s)
        return self._shared.load

    def shown_load(self, now_s: float) -> float:
        """The load for people: infinite while requests come and no replica is there for them.

        Decisions reckon with `load`, which is 0 then, so that nobody is refused for a share.
        """
        is_asked = now_s - self._asked_s < self._rules.memory_s
        return math.inf if self._capacity <= 0 and is_asked else self.load(now_s)

    def demand(self, now_s: float) -> tuple[float, float]:
        """What there is to do for replicas to come.

        Returns:
            Work that arrives, what is refused for want of prefill included, in seconds per second of the
            fastest replica; and the predicted seconds of what waits in tiers whose first tokens are due.
        """
        backlog_s = math.fsum(self.backlog_s(tier) for tier in self._due)
        if self._capacity > 0:
            return self.load(now_s) * self._capacity, backlog_s
        tenants = self._demand.by_tenant(now_s).values()  # what came before the last replica was lost
        return math.fsum(work for by_name in tenants for work in by_name.values()), backlog_s

    def refused_work(self, now_s: float) -> float:
        """Of the work that arrives, what is refused, in the same unit."""
        return self._demand.refused_work(now_s)

    def backlog_s(self, tier: Tier) -> float:
        """Predicted prefill seconds of a class that were admitted and have not been served."""
        return self._backlog.seconds(tier)

    def _longest(self, policy: TierPolicy) -> float:
        """How long a class's queue may take."""
        rules = self._rules
        if not _is_never_shed(policy):
            return rules.max_backlog_s
        return min(rules.max_backlog_s, max(rules.max_late_backlog_s, policy.due_s or 0.0))

    def _excess_backlog_s(self, tier: Tier, tenant: str, now_s: float) -> float:
        """How long a tenant has to wait until it may lengthen the queue of a class; 0 or less for now."""
        self._refresh(now_s)
        per_s = self._capacity * self._shared.parts.get(tier, 1.0)
        if per_s <= 0:
            return -math.inf
        longest_s = self._max_backlog_s[tier]
        limit_s = HARD_LIMIT * longest_s
        if tier in self._due and self._shared.kept > 1:
            if tier in self._sheddable or (tier, tenant) in self._shared.over_part:
                for waited_for in self._never_shed if tier in self._sheddable else (tier,):
                    if self._leaves_one_behind(waited_for, now_s):
                        return self.backlog_s(waited_for) / self._capacity
            longest_s = min(longest_s, self._max_overload_s[tier])
        return self._backlog.excess_s(tier, tenant, longest_s, limit_s, per_s)

    def _leaves_one_behind(self, tier: Tier, now_s: float) -> bool:
        """Whether the oldest request of a class has waited for longer than its queue may take."""
        if (oldest := self._backlog.oldest(tier)) is None:
            return False
        return now_s - oldest.admitted_s > self._max_backlog_s[tier] + oldest.work_s

    def _of_the_fleet(self, request: AdmissionRequest, now_s: float) -> Rejected | None:
        """The refusal of a request that is within its tenant's limits, None for none."""
        tier = request.tier
        self.decode.arrived(tier, request.decode, now_s, request.likeness)
        if not request.only_decode:
            self._demand.arrived(tier, request.tenant, request.work_s, now_s)
        refused = self._for_lack(request, now_s) if tier in self._sheddable else None
        if refused is not None and refused.lacked_decode:
            self.decode.turned_away(tier, request.decode, now_s, request.likeness)
            if not request.only_decode:
                self._demand.shed_for_decode(tier, request.tenant, request.work_s, now_s)
            return refused
        if request.only_decode:
            return refused
        if refused is None and (excess_s := self._excess_backlog_s(tier, request.tenant, now_s)) > 0:
            refused = self._refused(RejectionReason.BACKLOG, excess_s)
        if refused is None:
            self._credit.admitted(tier, request.work_s)
        else:
            self._demand.refused(request.work_s, now_s)
        return refused

    def _for_lack(self, request: AdmissionRequest, now_s: float) -> Rejected | None:
        """The refusal of a request that may be shed, None for none."""
        self._refresh(now_s)
        tier, rules = request.tier, self._rules
        falls_s = rules.memory_s * math.log(max(1.0, self._shared.load / rules.pressure))
        is_calm = request.only_decode or self.backlog_s(tier) <= rules.calm_s * self._capacity
        covered = self._credit.covers(tier, request.work_s, self._capacity, now_s) and is_calm
        above_share = self._shared.above_share.get(tier, 0.0)
        of_prefill = 0.0 if covered and not request.only_decode else above_share
        is_above_of_decode = self._capacity > 0 and self.decode.is_above_share(tier)
        level = self._shed.get(tier, 0.0)
        shed = level * (1.0 if is_above_of_decode else of_prefill)
        shed_of_prefill = min(shed, level * above_share)
        if shed > 0 and (drawn := self._draw()) < shed:
            refused = self._refused(RejectionReason.SHED_BY_POLICY, max(falls_s, rules.min_shed_retry_s))
            is_of_decode = is_above_of_decode and (request.only_decode or drawn >= shed_of_prefill)
            return replace(refused, lacked_decode=is_of_decode)
        odds = NO_ODDS if is_calm else self._shared.odds.get(tier, NO_ODDS)
        asked = 1.0 - shed + shed_of_prefill
        if (fraction := odds.beside(shed_of_prefill, asked, request.tenant)) <= 0:
            return None
        chance = self._demand.chance(tier, request.tenant, request.work_s, fraction, rules.max_refusal)
        if (drawn := self._draw()) < chance:
            return self._refused(odds.reason(drawn * (odds.of(request.tenant) / chance)), falls_s)
        return None

    def _refused(self, reason: RejectionReason, retry_after_s: float) -> Rejected:
        return Rejected(reason, min(max(retry_after_s, self._rules.min_retry_s), self._rules.max_retry_s))

    def _refresh(self, now_s: float) -> None:
        """Divide the fleet anew, if that was long ago."""
        if now_s - self._refreshed_s >= _REFRESH_S:
            self._refreshed_s = now_s
            asked, for_decode = self._demand.by_tenant(now_s), self._demand.shed_for_decode_work(now_s)
            self._shared = self._sharing.divided(asked, for_decode, self._capacity, self._reserved)

    def _hear(self, asker: str, now_s: float) -> None:
        """Note that an asker lives; when nobody has said so for long, all others have that long anew."""
        if self._heard and now_s - max(self._heard.values()) > _ASKER_GONE_S:
            self._heard = dict.fromkeys(self._heard, now_s)  # the listener was away, not all who speak
        if asker:
            self._heard[asker] = now_s

    def _forget_old(self, now_s: float) -> None:
        old = takewhile(lambda job: now_s - job[1].admitted_s >= _FORGET_AFTER_S, self._jobs.items())
        for job_id in [job_id for job_id, job in old if job.asker not in self._heard]:
            self.ended(job_id, now_s)


def _is_never_shed(policy: TierPolicy) -> bool:
    """Whether its requests are late rather than refused."""
    return not policy.sheddable and policy.has_deadline
