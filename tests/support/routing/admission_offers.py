"""A controller of admission, and requests that are offered to it at given loads."""

import random
from collections import Counter

from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRequest, AdmissionRules
from slo.admission.tenant_limits import TenantGates, Usage
from slo.errors import RejectionReason
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, Tier

WORK_S = 0.1
LACK = {RejectionReason.OVER_SHARE, RejectionReason.RESERVED, RejectionReason.TENANT_SHARE}
NO_BACKLOG = AdmissionRules(max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0)


def controller(rules=NO_BACKLOG, replicas=1.0, seed=1, **limits):
    tenants = TenantGates()
    for tenant, limit in limits.items():
        tenants.of(tenant, limit)
    made = AdmissionController(DEFAULT_TIERS, rules, tenants, random.Random(seed).random)
    made.capacity_changed(replicas, 0.0)
    return made


def request(number, tier=BACKGROUND, tenant="a", work_s=WORK_S, tokens=100):
    return AdmissionRequest(JobId(f"{tier}-{tenant}-{number}"), tier, tenant, Usage(tokens), work_s)


def offer(admission, loads, seconds=120.0, warm_s=60.0, serve=True):
    """Evenly spaced requests at the given load of each (tier, tenant); what became of them after a while."""
    arrivals = sorted(
        (number * WORK_S / load, key, number)
        for key, load in loads.items()
        for number in range(int(seconds * load / WORK_S))
    )
    for tier in {tier for tier, _ in loads}:  # a queue that is never done
        admission.decide(request("queue", tier, tokens=1), 0.0)
    fates = {key: Counter() for key in loads}
    for at_s, (tier, tenant), number in arrivals:
        asked = request(number, tier, tenant)
        decision = admission.decide(asked, at_s)
        if serve:
            admission.ended(asked.job_id, at_s)
        if at_s >= warm_s:
            fates[tier, tenant][getattr(decision, "reason", "admitted")] += 1
    return fates


def part_admitted(fates):
    return fates["admitted"] / sum(fates.values())


def offered(**by_tier):
    return {(Tier(name), "a"): load for name, load in by_tier.items()}
