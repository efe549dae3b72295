"""Every refusal has its error answer, which says whose limit it was."""

import json
import re
from dataclasses import fields

import pytest

from deployments.http.errors import rejected
from slo.admission.tenant_limits import TenantLimit
from slo.errors import Rejected, RejectionReason
from slo.objectives import Objective
from slo.outcomes import Outcome
from slo.tiers import STANDARD

OBJECTIVE = Objective(STANDARD, 0.5, None)
LIMITS = {
    RejectionReason.REQUEST_RATE,
    RejectionReason.TOKEN_RATE,
    RejectionReason.OUTPUT_TOKEN_RATE,
    RejectionReason.CONCURRENCY,
}
NOBODY = {RejectionReason.NO_REPLICA, RejectionReason.NOT_SETTLED}


@pytest.mark.parametrize("reason", RejectionReason)
def test_every_refusal_has_its_answer(reason):
    infeasible = reason is RejectionReason.DEADLINE_INFEASIBLE
    error = rejected(
        Rejected(reason, 2.3, 0.9 if infeasible else None, 0.5), {"x-slo-tier": "standard"}, OBJECTIVE
    )
    body = json.loads(error.response().body)["error"]
    assert body["code"] == reason.value
    assert body["message"]
    assert error.headers == {"x-slo-tier": "standard", "retry-after": "3"}
    assert error.status == (503 if reason in NOBODY else 429)
    if reason in LIMITS:
        assert (body["type"], error.outcome) == ("rate_limit_error", Outcome.REJECTED)
    elif reason in NOBODY:
        assert (body["type"], error.outcome) == ("service_unavailable", Outcome.SHED)
    else:
        assert (body["type"], error.outcome) == ("overloaded_error", Outcome.SHED)


@pytest.mark.parametrize("reason", sorted(LIMITS))
def test_a_refusal_names_the_limit_and_whose_it_is(reason):
    of_tenant, of_key = (
        rejected(Rejected(reason, 1.0, key_name=name), {}, OBJECTIVE).message for name in (None, "ci")
    )
    limit = re.search(r" limits\.(\w+)", of_tenant)[1]
    assert limit in {field.name for field in fields(TenantLimit)}
    assert of_tenant.startswith("this tenant ")
    assert of_key.startswith("the key 'ci' of this tenant ")
    assert f"key_limits.{limit}" in of_key
