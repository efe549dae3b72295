"""Who is let in where the tiers are a deployment's own."""

import random

import pytest
from admission_offers import LACK, NO_BACKLOG, offer, request
from own_tiers import FILE, FOUR, IMAGE, SEARCH, SEVEN, TEXT

from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates
from slo.errors import Rejected, RejectionReason


def of_tiers(tiers, rules=NO_BACKLOG):
    made = AdmissionController(tiers, rules, TenantGates(), random.Random(1).random)
    made.capacity_changed(1.0, 0.0)
    return made


@pytest.mark.parametrize("tiers", [FOUR, SEVEN], ids=["four", "seven"])
def test_the_top_tier_and_what_may_not_be_shed_are_never_refused(tiers):
    fates = offer(of_tiers(tiers), {(tier, "a"): 1.0 for tier in tiers.names})
    for (tier, _), fate in fates.items():
        if tier in tiers.sheddable:
            assert sum(fate[reason] for reason in LACK) > 0, tier
        else:
            assert set(fate) == {"admitted"}, tier


def test_what_the_monitor_sheds_is_refused_by_name():
    """Each asks for far more than its share."""
    admission = of_tiers(SEVEN)
    admission.follow(dict.fromkeys(SEVEN.names, 1.0), 0.0)
    for second, tier in enumerate(SEVEN.names):
        decision = admission.decide(request(1, tier, work_s=1e6), float(second))
        refused = isinstance(decision, Rejected) and decision.reason is RejectionReason.SHED_BY_POLICY
        assert refused == (tier in SEVEN.sheddable), tier


def test_the_reservation_is_kept_for_the_top_tier():
    rules = AdmissionRules(max_backlog_s=1e9, max_late_backlog_s=1e9, calm_s=0.0, reserved=0.5)
    loads = {(TEXT, "a"): 0.1, (IMAGE, "a"): 0.6, (SEARCH, "a"): 0.6, (FILE, "a"): 0.6}
    without, kept = (offer(of_tiers(FOUR, each), loads) for each in (NO_BACKLOG, rules))
    assert set(kept[TEXT, "a"]) == {"admitted"}
    assert any(fate[RejectionReason.RESERVED] for fate in kept.values())
    admitted = [sum(fate["admitted"] for fate in fates.values()) for fates in (without, kept)]
    assert admitted[1] < admitted[0]
