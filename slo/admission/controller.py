"""Which requests are admitted to a fleet that cannot serve all of them, decided before anything is queued.

Owns the account of what was admitted, and the rules by which the rest is refused. Whether one request can
meet its deadline is decided in `router.core`, the order of admitted requests in `slo.queue.order`.

Reads no clock and has no randomness of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from slo.admission.demand import MEMORY_S, RecentDemand, divide
from slo.errors import Rejected, RejectionReason
from slo.tiers import SYSTEM, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slo.admission.tenant_limits import TenantGates
    from slo.request import JobId
    from slo.tiers import TierSet

_REFRESH_S: Final = 0.1
"""Probabilities are as old as this at most."""
_FORGET_AFTER_S: Final = 3600.0
"""A request whose end is not reported for so long counts as ended."""
_LEAST: Final = 1e-9


class Dice(Protocol):
    """The part of `random.Random` that is needed."""

    def random(self) -> float:
        """A number from 0 up to, but not including, 1."""
        ...


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """When the fleet is under pressure, and what is done about it.

    Attributes:
        pressure: Load above which a class that is over its share is refused in part. Load is the work that
            arrives per second, over what the fleet can do in a second.
        max_refusal: Highest probability of a refusal for the share.
        reserved: Fraction of prefill time that is kept for the top tier, whether or not it is asked for.
        calm_s: A class whose queue the fleet could do in less time than this is not refused for its share:
            one client that waits for each answer may keep an idle fleet busy.
        max_backlog_s: A class whose queue would take longer than this at its part of the fleet is refused
            until it is shorter.
        memory_s: Time constant of the account of what arrives.
        min_retry_s: No refusal asks to come back sooner.
        max_retry_s: Nor later.
    """

    pressure: float = 0.8
    max_refusal: float = 0.8
    reserved: float = 0.10
    calm_s: float = 5.0
    max_backlog_s: float = 120.0
    memory_s: float = MEMORY_S
    min_retry_s: float = 1.0
    max_retry_s: float = 60.0


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """What matters of a request.

    Attributes:
        tenant: Who sends it.
        tokens: Prompt tokens.
        work_s: Predicted seconds of its prefill on an idle replica.
    """

    job_id: JobId
    tier: Tier
    tenant: str
    tokens: int
    work_s: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may be placed."""


AdmissionDecision: TypeAlias = Admitted | Rejected
ADMITTED: Final = Admitted()


class _Job(NamedTuple):
    tier: Tier
    tenant: str
    work_s: float
    admitted_s: float


class _Odds(NamedTuple):
    """Probabilities of refusing a request of a class: for its share, and with the reservation besides."""

    over_share: float
    with_reserve: float
    by_tenant: Mapping[str, float]


_NO_ODDS: Final = _Odds(0.0, 0.0, {})


class AdmissionController:
    """Decides for a whole fleet.

    Args:
        tiers: Share of each tier, and whether it may be shed. The top tier, and one that may not be shed, is
            not refused for lack of capacity; tenants' limits hold for every tier but the server's own.
        rules: See `AdmissionRules`.
        tenants: Limits of each tenant.
        dice: For refusals with a probability; seeded by its owner.
    """

    def __init__(
        self,
        tiers: TierSet,
        rules: AdmissionRules,
        tenants: TenantGates,
        dice: Dice,
    ) -> None:
        self._rules = rules
        self._tenants = tenants
        self._dice = dice
        self._shares = {tier: max(policy.share, _LEAST) for tier, policy in tiers.items()}
        self._sheddable = frozenset(tiers.sheddable)
        self._capacity = 0.0
        self._demand = RecentDemand(rules.memory_s)
        self._jobs: dict[JobId, _Job] = {}
        self._backlog_s = dict.fromkeys(tiers, 0.0)
        self._waiting: set[JobId] = set()
        self._shed: Mapping[Tier, float] = {}
        self._reserved = rules.reserved
        self._refreshed_s = -math.inf
        self._load = 0.0
        self._odds: dict[Tier, _Odds] = {}
        self._parts: dict[Tier, float] = {}

    def decide(self, request: AdmissionRequest, now_s: float) -> AdmissionDecision:
        """Whether a request is admitted; if so it counts as admitted until it has `ended`.

        One that has been admitted before, and is placed again, is admitted without counting anew.

        Args:
            request: The request.
            now_s: The time; never earlier than in the call before.
        """
        if request.job_id in self._jobs:
            return ADMITTED
        tier = request.tier
        if tier != SYSTEM:
            gate = self._tenants.of(request.tenant)
            if (limit := gate.refusal(request.tokens, now_s)) is not None:
                return self._refused(*limit)
            self._demand.arrived(tier, request.tenant, request.work_s, now_s)
            if tier in self._sheddable and (refused := self._for_lack(request, now_s)) is not None:
                return refused
            gate.began(request.tokens, now_s)
        self._forget_old(now_s)
        self._jobs[request.job_id] = _Job(tier, request.tenant, request.work_s, now_s)
        self._waiting.add(request.job_id)
        self._backlog_s[tier] += request.work_s
        return ADMITTED

    def served(self, job_id: JobId) -> None:
        """A prefill has ended, or is not wanted any more; the request may go on."""
        if job_id in self._waiting:
            self._waiting.remove(job_id)
            job = self._jobs[job_id]
            self._backlog_s[job.tier] = max(0.0, self._backlog_s[job.tier] - job.work_s)

    def ended(self, job_id: JobId, now_s: float) -> None:
        """A request has ended, however it did; one that is not known is ignored."""
        self.served(job_id)
        if (job := self._jobs.pop(job_id, None)) is not None and job.tier != SYSTEM:
            self._tenants.of(job.tenant).ended(now_s - job.admitted_s)

    def has_capacity(self, replicas: float) -> None:
        """The fleet can do so many seconds of prefill work in a second."""
        self._capacity = replicas

    def follow(self, shed: Mapping[Tier, float], reserved: float) -> None:
        """Apply the monitor's policy until the next one.

        Args:
            shed: Fraction of its requests to refuse, 0 to 1, by tier; none of a tier that is not there, nor
                of one that may not be shed.
            reserved: Fraction of prefill time to keep for the top tier, if that is more than
                `AdmissionRules.reserved`.
        """
        self._shed = dict(shed)
        self._reserved = max(reserved, self._rules.reserved)
        self._refreshed_s = -math.inf

    def load(self, now_s: float) -> float:
        """Work that arrives per second, over what the fleet can do in a second."""
        self._refresh(now_s)
        return self._load

    def backlog_s(self, tier: Tier) -> float:
        """Predicted prefill seconds of a class that were admitted and have not been served."""
        return self._backlog_s[tier]

    def _for_lack(self, request: AdmissionRequest, now_s: float) -> Rejected | None:
        """The refusal of a request that may be shed, None for none."""
        self._refresh(now_s)
        tier, load = request.tier, self._load
        falls_s = self._demand.memory_s * math.log(max(1.0, load / self._rules.pressure))
        shed = self._shed.get(tier, 0.0)
        if shed > 0 and self._dice.random() < shed:
            return self._refused(RejectionReason.SHED_BY_POLICY, falls_s)
        is_calm = self._backlog_s[tier] <= self._rules.calm_s * self._capacity
        odds = _NO_ODDS if is_calm else self._odds.get(tier, _NO_ODDS)
        chance = odds.by_tenant.get(request.tenant, odds.with_reserve)
        if chance > 0 and (drawn := self._dice.random()) < chance:
            if drawn < odds.over_share:
                reason = RejectionReason.OVER_SHARE
            elif drawn < odds.with_reserve:
                reason = RejectionReason.RESERVED
            else:
                reason = RejectionReason.TENANT_SHARE
            return self._refused(reason, falls_s)
        per_s = self._capacity * self._parts.get(tier, 1.0)
        if per_s > 0 and (excess_s := self._backlog_s[tier] / per_s - self._rules.max_backlog_s) > 0:
            return self._refused(RejectionReason.BACKLOG, excess_s)
        return None

    def _refused(self, reason: RejectionReason, retry_after_s: float) -> Rejected:
        rules = self._rules
        return Rejected(reason, min(max(retry_after_s, rules.min_retry_s), rules.max_retry_s))

    def _refresh(self, now_s: float) -> None:
        """Work out the probabilities anew, if they are old."""
        if now_s - self._refreshed_s < _REFRESH_S:
            return
        self._refreshed_s = now_s
        if self._capacity <= 0:
            self._load, self._odds, self._parts = 0.0, {}, {}
            return
        tenants = {
            tier: {name: work / self._capacity for name, work in by_name.items()}
            for tier, by_name in self._demand.by_tenant(now_s).items()
        }
        demands = {tier: math.fsum(by_name.values()) for tier, by_name in tenants.items()}
        self._load = load = math.fsum(demands.values())
        shed = {tier: demand for tier, demand in demands.items() if tier in self._sheddable and demand > 0}
        kept = load - math.fsum(shed.values())
        self._parts = {
            tier: max(
                self._shares[tier],
                1.0
                - max(kept, self._reserved)
                - math.fsum(demand for other, demand in shed.items() if other != tier),
            )
            for tier in self._sheddable
        }
        if load <= self._rules.pressure:
            self._odds = {}
            return
        plain = self._divided(shed, load, kept)
        reserved = self._divided(shed, load, max(kept, self._reserved))
        self._odds = {
            tier: _Odds(
                self._chance(plain[tier], demand),
                self._chance(reserved[tier], demand),
                self._by_tenant(reserved[tier], tenants[tier]),
            )
            for tier, demand in shed.items()
        }

    def _divided(self, demands: Mapping[Tier, float], load: float, taken: float) -> dict[Tier, float]:
        """What each class may have of the fleet, `taken` of it being others'; at least its share.

        What is admitted in total follows the load up to `AdmissionRules.pressure`, and then comes near to
        1 without reaching it.
        """
        room = 1.0 - self._rules.pressure
        whole = 1.0 - room * math.exp((self._rules.pressure - load) / room) if room > 0 else 1.0
        entitled = min(math.fsum(self._shares[tier] for tier in demands), 1.0 - self._reserved)
        return divide(max(whole - taken, entitled), demands, self._shares)

    def _by_tenant(self, part: float, demands: Mapping[str, float]) -> dict[str, float]:
        """Chances by tenant: those that ask for more than a fair part of their class bear its excess."""
        asking = {name: demand for name, demand in demands.items() if demand > 0}
        weights = {name: self._tenants.weight(name) for name in asking}
        parts = divide(part, asking, weights)
        return {name: self._chance(parts[name], demand) for name, demand in asking.items()}

    def _chance(self, part: float, demand: float) -> float:
        """The fraction of `demand` that is too much for `part`, within limits."""
        return min(self._rules.max_refusal, max(0.0, 1.0 - part / demand))

    def _forget_old(self, now_s: float) -> None:
        while self._jobs:
            job_id = next(iter(self._jobs))
            if now_s - self._jobs[job_id].admitted_s < _FORGET_AFTER_S:
                return
            self.ended(job_id, now_s)
