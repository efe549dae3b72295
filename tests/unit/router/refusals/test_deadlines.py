"""Deadlines that cannot be kept: what would help, and whether to come back."""

import pytest
from gated_router import LINE, router

from deployments.http.errors import rejected
from router.messages import PlacementRequested
from slo.errors import RejectionReason
from slo.objectives import Objective
from slo.reports import OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, STANDARD


@pytest.mark.parametrize(
    ("objective", "header"),
    [
        (Objective(STANDARD, None, None, e2e_s=0.2), "x-slo-e2e-ms"),
        (Objective(STANDARD, 9.0, None, e2e_s=0.2), "x-slo-e2e-ms"),
        (Objective(STANDARD, 0.1, None, e2e_s=90.0), "x-slo-ttft-ms"),
        (Objective(STANDARD, 0.1, None), "x-slo-ttft-ms"),
        (Objective(STANDARD, None, None, ttft_scale=0.01), "x-slo-ttft-ms"),
    ],
)
def test_a_refusal_names_the_header_that_would_give_it_more_time(objective, header):
    core, _ = router()
    asked = PlacementRequested(JobId("late"), objective, True, 10_000, 0)
    refused = core.place(asked, 0.0)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert rejected(refused, {}, objective).message.endswith(f"ask for a longer {header}")


def busy_router():
    """A router whose one replica has half a minute to go."""
    core, admission = router()
    running = OutstandingJob(JobId("long"), BACKGROUND, 30_000, None)
    core.prefill_reported(PrefillReported(ReplicaId("prefill-0"), LINE, (running,), running.job_id, 0.0), 0.0)
    return core, admission


@pytest.mark.parametrize(
    ("objective", "is_explicit", "helps"),
    [
        (Objective(STANDARD, 0.05, None), True, False),
        (Objective(STANDARD, 0.2, None), True, True),
        (Objective(STANDARD, None, None, e2e_s=0.05), True, False),
        (Objective(STANDARD, None, None, e2e_s=5.0), True, True),
        (Objective(STANDARD, 0.05, None), False, True),
        (Objective(STANDARD, None, None, ttft_scale=0.5), True, False),
        (Objective(STANDARD, None, None, ttft_scale=1.5), True, True),
    ],
)
def test_a_deadline_that_an_idle_replica_could_not_keep_is_not_to_be_tried_again(
    objective, is_explicit, helps
):
    core, _ = busy_router()
    refused = core.place(PlacementRequested(JobId("late"), objective, is_explicit, 100, 0), 0.0)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert (refused.retry_after_s is not None) == helps
    error = rejected(refused, {}, objective)
    assert ("retry-after" in error.headers) == helps
    assert error.headers.get("x-should-retry") == (None if helps else "false")
    assert ("retry later" in error.message) == helps
    assert ("not even an idle replica could be in time" in error.message) != helps


@pytest.mark.parametrize(("ttft_s", "asked_s"), [(0.05, 0.0), (0.2, 10.0)], ids=["out of reach", "in reach"])
def test_a_deadline_that_no_fleet_could_keep_asks_for_no_prefill_replica(ttft_s, asked_s):
    core, admission = busy_router()
    for number in range(100):
        asked = PlacementRequested(JobId(f"{number}"), Objective(STANDARD, ttft_s, None), True, 100, 0)
        assert core.place(asked, 0.0).reason is RejectionReason.DEADLINE_INFEASIBLE
    work, _ = admission.demand(0.2)
    assert work == pytest.approx(asked_s / 20, rel=0.02, abs=1e-9)
    assert admission.refused_work(0.2) == pytest.approx(work, rel=0.02, abs=1e-9)
    assert admission.shown_load(0.2) == pytest.approx(work)


@pytest.mark.parametrize("e2e_s", [0.05, 0.5])
def test_so_is_an_end_of_the_clients_own_before_which_no_first_token_comes(e2e_s):
    core, _ = busy_router()
    objective = Objective(STANDARD, 0.01, None, e2e_s=e2e_s)
    asked = PlacementRequested(JobId("late"), objective, False, 100, 0, explicit_e2e_s=e2e_s)
    refused = core.place(asked, 0.0)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert (refused.retry_after_s is None) == (e2e_s < 0.1)
