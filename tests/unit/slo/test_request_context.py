"""The context of a request survives the way in a header, and nobody can forge it."""

from dataclasses import replace

import msgspec
import pytest

from slo.protocol import PROTOCOL
from slo.request import CONTEXT_HEADER, JobId, ReplicaId, RequestContext
from slo.tiers import BACKGROUND, PREMIUM

CONTEXT = RequestContext(
    JobId("job"), "id", PREMIUM, 0.5, 0.05, ReplicaId("p"), ReplicaId("d"), prompt_bytes=7
)


def test_it_survives_a_header():
    headers = {CONTEXT_HEADER: CONTEXT.encode()}
    assert CONTEXT.encode().isascii()
    assert RequestContext.from_headers(headers) == CONTEXT
    assert RequestContext.from_headers({}) is None


def test_budgets_shrink_as_time_passes_and_prefill_leaves_room_for_the_handoff():
    assert CONTEXT.after(0.1).ttft_budget_s == 0.4
    assert CONTEXT.for_prefill().ttft_budget_s == pytest.approx(0.45)
    named = replace(CONTEXT, explicit_e2e_s=2.0).after(0.5)
    assert (named.ttft_budget_s, named.explicit_e2e_s) == (0.0, 1.5)
    undated = RequestContext(JobId("job"), "id", BACKGROUND, None)
    assert undated.after(9.0) is undated


def test_a_forged_or_broken_header_is_refused():
    with pytest.raises(msgspec.ValidationError):
        RequestContext.decode(f'{PROTOCOL} {{"job_id": "x"}}')
