"""One job's failure is its own; a replica that is lost is lost to all."""

import time

import pytest

from router.fleet.view import RouterLimits
from router.serve.deployment import RouterConfig, SlackRouter
from slo.predict.prefill_time import PrefillPredictor
from slo.replacement import FailureCause, Replaced, ReplacementRequested
from slo.reports import DecodeReported, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS, STANDARD

A, B, D = (ReplicaId(name) for name in "abd")


@pytest.mark.parametrize(("lost", "left"), [(None, {A, B}), (A, {B})])
async def test_only_a_replica_that_is_lost_is_forgotten(lost, left):
    router = SlackRouter(RouterConfig(DEFAULT_TIERS, "least_harm", RouterLimits()))
    for name in (A, B):
        await router.report(PrefillReported(name, PrefillPredictor(1e-4, 1e-3), (), None, 0.0))
    await router.report(DecodeReported(D, 0.0, 0))
    cause = FailureCause.REQUEST_FAILED if lost is None else FailureCause.PULL_FAILED
    again = ReplacementRequested(JobId("job"), STANDARD, 2.0, False, 100, D, (A,), cause, lost)
    placed = await router.replace(again)
    assert isinstance(placed, Replaced)
    assert placed.prefill_replica == B
    assert {view.replica_id for view in router._core.view.usable_prefill(time.monotonic())} == left


def test_what_says_something_about_a_replica():
    about_one_job = {FailureCause.REQUEST_FAILED, FailureCause.SILENT}
    assert {cause for cause in FailureCause if not cause.is_replicas} == about_one_job
