"""One job's failure is its own; a replica that is lost is lost to all."""

import math
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from router.fleet.view import RouterLimits
from router.messages import Answered, JobEnded, LiveJobs, Placed, PlacementRequested
from router.serve import model_router
from router.serve.deployment import SlackRouter
from router.serve.model_router import Route, RouterConfig
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates, TenantLimit, Usage
from slo.errors import Rejected, RejectionReason
from slo.monitor.messages import Role
from slo.monitor.policy import ClusterPolicy
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.replacement import FailureCause, Replaced, ReplacementRequested
from slo.reports import DecodeReported, EngineEnd, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS, STANDARD, Tier

A, B, D = (ReplicaId(name) for name in "abd")
PREDICTOR = PrefillPredictor(1e-4, 1e-3)
TWO = RouterConfig(DEFAULT_TIERS, "least_harm", RouterLimits(), {"small": Route(), "large": Route()})


def request(job, limit=None):
    return PlacementRequested(
        JobId(job), Objective(STANDARD, 9.0, None), False, 100, 0, tenant="acme", limit=limit
    )


async def two_models():
    router = SlackRouter(TWO)
    for model in TWO.models:
        await router.report(PrefillReported(f"p-{model}", PREDICTOR, (), None, 0.0), model=model)
        await router.report(DecodeReported(f"d-{model}", 0.0, 0), model=model)
    return router


async def test_a_model_has_a_fleet_of_its_own():
    router = await two_models()
    for model in TWO.models:
        placed = await router.place(request(f"of-{model}"), model=model)
        assert (placed.prefill_replica, placed.decode_replica) == (f"p-{model}", f"d-{model}")
    await router.report(ReplicaGone(ReplicaId("p-small")), model="small")
    assert isinstance(await router.place(request("none"), model="small"), Rejected)
    assert isinstance(await router.place(request("some"), model="large"), Placed)
    assert [(await router.fleet(model=model))["ready"] for model in TWO.models] == [False, True]
    with pytest.raises(ValueError, match="no model 'other', but small, large"):
        await router.place(request("lost"), model="other")


async def test_of_a_model_that_it_does_not_know_a_router_says_that_no_replica_is_there():
    """Its ingress is of another configuration, and has other models to answer for."""
    router = await two_models()
    known, other = await router.fleet(model="small"), await router.fleet(model="other")
    assert other == {
        "model": "other",
        "ready": False,
        "serves": False,
        "settled": True,
        "tiers": known["tiers"],
        "prefill": [],
        "decode": [],
    }
    assert (await router.fleet())["model"] == "small"


class Counts:
    """How often each counter has counted, by its name and its labels."""

    def __init__(self):
        self.values = Counter()

    def count(self, metric, value=1, **labels):
        self.values[metric.name, *labels.values()] += value

    def set(self, metric, value, **labels):
        pass


def test_an_engine_that_has_ended_is_counted_once_however_often_its_replica_says_it():
    counts = Counts()
    router = model_router.ModelRouter("small", TWO, TenantGates(), counts)
    gone = ReplicaGone(A, (Role.PREFILL, EngineEnd.HUNG))
    for report in (
        ReplicaGone(A),
        gone,
        gone,
        ReplicaGone(B),
        ReplicaGone(D, (Role.DECODE, EngineEnd.FAILED)),
    ):
        router.report(report)
    assert counts.values == {
        ("slackserve_engines_ended", "small", "prefill", "hung"): 1,
        ("slackserve_engines_ended", "small", "decode", "failed"): 1,
    }


class Gauges:
    """The latest value of each gauge, by its name and its labels."""

    def __init__(self):
        self.values = {}

    def set(self, metric, value, **labels):
        self.values[metric.name, *labels.values()] = value

    def count(self, *_, **__):
        pass

    observe = count


@pytest.mark.parametrize("local_prefill", [False, True])
def test_gauges_are_set_with_every_report_and_a_fleet_that_is_gone_has_no_load_of_0(
    monkeypatch, local_prefill
):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(model_router, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    gauges = Gauges()
    config = replace(TWO, limits=RouterLimits(local_prefill=local_prefill))
    router = model_router.ModelRouter("small", config, TenantGates(), gauges)
    clock.now_s = 100.0

    def load():
        gauges.values.clear()
        clock.now_s += 1.0
        router.report(DecodeReported(D, 0.0, 0))
        return gauges.values["slackserve_fleet_load_ratio", "small"]

    router.report(PrefillReported(A, PREDICTOR, (), None, 0.0))
    assert gauges.values["slackserve_prompt_bytes_per_token", "small"] > 0
    assert load() == 0.0
    assert isinstance(router.place(request("served")), Placed)
    assert 0.0 < load() < 1.0
    router.report(ReplicaGone(A))
    assert isinstance(router.place(request("by-decode")), Placed if local_prefill else Rejected)
    assert load() == math.inf
    clock.now_s += 100.0
    assert load() == 0.0, "nobody asks any more"


@pytest.mark.parametrize("is_too_much", [False, True])
def test_the_monitor_is_told_how_much_work_is_refused_of_what_arrives(monkeypatch, is_too_much):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(model_router, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    participants = []

    def client(participant, *_):
        participants.append(participant)
        return SimpleNamespace(start=lambda: None, note=lambda _: None)

    monkeypatch.setattr(model_router, "MonitorClient", client)
    config = replace(TWO, find_monitor=lambda: None, admission=AdmissionRules(max_backlog_s=0.5))
    router = model_router.ModelRouter("small", config, TenantGates(), Gauges())
    router.report(PrefillReported(A, PREDICTOR, (), None, 0.0))
    router.report(DecodeReported(D, 0.0, 0))
    asked = replace(request("first"), objective=Objective(STANDARD, None, None), prompt_tokens=5000)
    decided = []
    for number in range(20 if is_too_much else 1):
        clock.now_s += 0.01
        decided.append(router.place(replace(asked, job_id=JobId(f"{number}"))))
    assert isinstance(decided[0], Placed)
    clock.now_s += 1.0
    told = participants[0].seen(()).demand.prefill
    assert told.work > 0
    refused = sum(isinstance(one, Rejected) for one in decided)
    assert (refused > 0) == is_too_much
    assert told.refused == pytest.approx(told.work * refused / len(decided), rel=0.01)


def test_the_monitor_counts_each_request_once_and_none_that_is_served_without_the_router(monkeypatch):
    clock, noted = SimpleNamespace(now_s=0.0), []
    monkeypatch.setattr(model_router, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    client = SimpleNamespace(start=lambda: None, note=noted.append)
    monkeypatch.setattr(model_router, "MonitorClient", lambda *_: client)
    router = model_router.ModelRouter(
        "small", replace(TWO, find_monitor=lambda: None), TenantGates(), Gauges()
    )
    assert router.place(request("early")).reason is RejectionReason.NOT_SETTLED
    clock.now_s = 5.0
    router.report(PrefillReported(A, PREDICTOR, (), None, 0.0))
    router.report(DecodeReported(D, 0.0, 0))
    placed = router.place(request("placed"))
    again = replace(request("placed"), is_admitted=True, decode_replica=D)
    late = replace(again, explicit_deadline=True, objective=Objective(STANDARD, 0.001, None))
    assert isinstance(router.place(again), Placed)
    assert router.place(late).reason is RejectionReason.DEADLINE_INFEASIBLE
    limited = router.place(request("limited", TenantLimit(max_concurrent=1)))
    assert limited.reason is RejectionReason.CONCURRENCY
    assert noted == [(STANDARD, placed), (STANDARD, limited)]


def test_what_decode_has_in_use_is_told_to_the_monitor_and_to_admission():
    router = model_router.ModelRouter("small", TWO, TenantGates(), Gauges())
    router.report(PrefillReported(A, PREDICTOR, (), None, 0.0))
    router.report(DecodeReported(D, 0.9, 0))
    for number in range(10):
        assert isinstance(router.place(request(f"{number}")), Placed)
    jobs = tuple(JobId(f"{number}") for number in range(10))
    router.report(PrefillReported(A, PREDICTOR, (), None, 0.0, ended=jobs))
    router.follow(ClusterPolicy(1, {STANDARD: 1.0}))
    assert isinstance(router.place(request("before")), Placed)
    demand = router._seen(()).demand
    assert (demand.decode.memory, demand.decode.replicas) == (0.9, 1)
    assert demand.prefill.replicas == 1
    assert demand.decode.asked == pytest.approx(0.9), "nobody was refused"
    refused = router.place(request("after"))
    assert refused.reason is RejectionReason.SHED_BY_POLICY, "its tier has all that decode has"
    router.report(DecodeReported(D, 0.2, 10))
    router._seen(())
    assert isinstance(router.place(request("at ease")), Placed)


async def test_a_tenants_limit_holds_over_all_models():
    router, limit = await two_models(), TenantLimit(max_concurrent=2)
    first, second = [await router.place(request(model, limit), model=model) for model in TWO.models]
    assert isinstance(first, Placed)
    assert isinstance(second, Placed)
    refused = await router.place(request("third", limit), model="small")
    assert refused.reason is RejectionReason.CONCURRENCY
    await router.job_ended(JobEnded(JobId("large")), model="large")
    assert isinstance(await router.place(request("fourth", limit), model="small"), Placed)


async def test_a_tier_that_only_the_ingress_knows_counts_as_the_lowest():
    router = await two_models()
    of_another = Objective(Tier("gold"), 9.0, None)
    with_prefix = replace(request("new"), objective=of_another, prefix_hashes=(1,), hash_block=128)
    placed = await router.place(with_prefix, model="small")
    assert isinstance(placed, Placed)
    assert placed.ttft_budget_s == 9.0, "what it was promised holds"
    again = replace(request("again"), objective=of_another, is_admitted=True)
    assert isinstance(await router.place(again, model="small"), Placed)
    await router.job_ended(
        JobEnded(JobId("new"), 0.1, answered=Answered(Tier("gold"), "acme", 5)), model="small"
    )
    lost = ReplacementRequested(
        JobId("again"),
        Tier("gold"),
        5.0,
        explicit_deadline=False,
        tokens=100,
        decode_replica=D,
        failed_replicas=(A,),
        cause=FailureCause.SILENT,
    )
    assert isinstance(await router.replace(lost, model="small"), Replaced)


async def test_requests_that_nobody_speaks_for_are_forgotten_though_their_model_is_quiet(monkeypatch):
    limit = TenantLimit(max_concurrent=1)
    router = await two_models()
    lost = replace(request("lost", limit), asker="gone", number=1)
    assert isinstance(await router.place(lost, model="small"), Placed)
    assert isinstance(await router.place(request("next", limit), model="large"), Rejected)
    began_s = time.monotonic()
    await router.reconcile(LiveJobs("gone", 1, (lost.job_id,)), model="small")
    for after_s in (1.0, 20.0, 40.0):
        monkeypatch.setattr(model_router, "time", SimpleNamespace(monotonic=lambda s=began_s + after_s: s))
        await router.reconcile(LiveJobs("here", 0, ()), model="small")
    monkeypatch.undo()
    assert isinstance(await router.place(request("again", limit), model="large"), Placed)


async def test_ends_that_were_missed_come_with_the_word_of_what_lives():
    limit = TenantLimit(output_tokens_per_s=1.0, burst_output_tokens=1000)
    router, asked = await two_models(), replace(request("first", limit), output_tokens=300, asker="here")
    for number, job in enumerate(("first", "second", "third"), 1):
        each = replace(asked, job_id=JobId(job), number=number)
        assert isinstance(await router.place(each, model="small"), Placed)
    ended = tuple(JobEnded(JobId(job), used=Usage(100, 10)) for job in ("first", "second"))
    await router.reconcile(LiveJobs("here", 3, (JobId("third"),), ended), model="small")
    more = replace(asked, job_id=JobId("fourth"), output_tokens=650, number=4)
    assert isinstance(await router.place(more, model="small"), Placed), "two took 10, one may take 300"
    more = replace(asked, job_id=JobId("fifth"), output_tokens=300, number=5)
    assert (await router.place(more, model="small")).reason is RejectionReason.OUTPUT_TOKEN_RATE


async def test_one_models_backlog_is_not_the_others():
    router = await two_models()
    refusals = 0
    for number in range(3000):
        slow = PlacementRequested(JobId(f"slow-{number}"), Objective(STANDARD, 9.0, None), False, 50_000, 0)
        refusals += isinstance(await router.place(slow, model="large"), Rejected)
    assert refusals > 1000
    placed = await router.place(request("quick"), model="small")
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s < 0.5


@pytest.mark.parametrize(("lost", "left"), [(None, {A, B}), (A, {B})])
async def test_only_a_replica_that_is_lost_is_forgotten(lost, left):
    router = SlackRouter(RouterConfig(DEFAULT_TIERS, "least_harm", RouterLimits(), {"m": Route()}))
    for name in (A, B):
        await router.report(PrefillReported(name, PREDICTOR, (), None, 0.0), model="m")
    await router.report(DecodeReported(D, 0.0, 0), model="m")
    cause = FailureCause.REQUEST_FAILED if lost is None else FailureCause.PULL_FAILED
    again = ReplacementRequested(JobId("job"), STANDARD, 2.0, False, 100, D, (A,), cause, lost)
    placed = await router.replace(again, model="m")
    assert isinstance(placed, Replaced)
    assert placed.prefill_replica == B
    usable = router._models["m"]._core.view.usable_prefill(time.monotonic())
    assert {view.replica_id for view in usable} == left


def test_what_says_something_about_a_replica():
    about_one_job = {FailureCause.REQUEST_FAILED, FailureCause.SILENT, FailureCause.LEFT}
    of_one_that_serves = {FailureCause.OTHER_MODEL}
    not_lost = {cause for cause in FailureCause if not cause.is_replicas}
    assert not_lost == about_one_job | of_one_that_serves
