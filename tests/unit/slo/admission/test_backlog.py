"""What counts as waiting for prefill, whatever comes first: the request or its replica's report."""

from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRequest, AdmissionRules
from slo.admission.tenant_limits import TenantGates, Usage
from slo.request import JobId
from slo.tiers import DEFAULT_TIERS, STANDARD

LATE = JobId("late")


def test_a_request_that_is_asked_for_after_its_replica_named_it_waits_once():
    """Its ingress did not wait for the router's answer, and sent it off."""
    admission = AdmissionController(DEFAULT_TIERS, AdmissionRules(), TenantGates(), lambda: 1.0)
    admission.capacity_changed(1.0, 0.0)
    for at_s in range(3):
        admission.waits(LATE, STANDARD, 4.0, float(at_s))
        asked = AdmissionRequest(LATE, STANDARD, "tenant", Usage(100), 3.0)
        assert admission.decide(asked, float(at_s)) is None
        assert admission.backlog_s(STANDARD) == 3.0, "what was predicted of it last"
        admission.served(LATE)
        assert admission.backlog_s(STANDARD) == 0.0
        admission.ended(LATE, float(at_s))
