"""What follows from the router's answer: for the request's account, its client and its other processes."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest
from ray.exceptions import TaskCancelledError
from ray.serve.llm.openai_api_models import CompletionRequest
from starlette.datastructures import State

from deployments.http.accounting import Identity, RequestRecord
from deployments.http.errors import HTTPError
from deployments.http.placing.admission import admit, response_headers
from deployments.http.placing.asked import Asked
from router.messages import Placed, PlacementReason
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRequest, AdmissionRules
from slo.admission.tenant_limits import NO_USAGE, TenantGates, TenantLimit, Usage
from slo.admission.tenants import ANONYMOUS
from slo.errors import Rejected, RejectionReason
from slo.objectives import E2E_HEADER, TTFT_HEADER, Objective
from slo.outcomes import Outcome
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS, PREMIUM, STANDARD, ObjectiveName

P, D = ReplicaId("p"), ReplicaId("d")
OBJECTIVE = Objective(STANDARD, 3.0, 0.05, clamped_from=PREMIUM)
HERE = Placed(
    P, D, 10, 2.0, 0.5, 1.5, 0.1, PlacementReason.NOBODY_LATE, promised_ttft_s=2.5, decode_wait_s=0.2
)
ON_DECODE = replace(HERE, prefill_replica=None, reason=PlacementReason.CHEAPER_ON_DECODE)
ONLY_DECODE = replace(HERE, prefill_replica=None, reason=PlacementReason.ONLY_DECODE)
NO_PREFILL = replace(HERE, prefill_replica=None, reason=PlacementReason.NO_PREFILL_REPLICA)
LATE = Rejected(
    RejectionReason.DEADLINE_INFEASIBLE, retry_after_s=1.5, predicted_ttft_s=4.0, ttft_budget_s=2.0
)


class Instruments:
    def count(self, *_, **__):
        pass

    def observe(self, *_, **__):
        pass


class Admission:
    """One request, from what the router answers on; it is the router as well."""

    def __init__(
        self, decision, *, limit=None, objective=OBJECTIVE, headers=((TTFT_HEADER, "3000"),), **body
    ):
        self.decision = decision
        self.told, self.ended = [], []
        arrived_s = time.monotonic() - 0.25
        self.body = CompletionRequest(model="tiny", **{"prompt": [1, 2, 3], "stream": True, **body})
        tenant = replace(ANONYMOUS, limit=limit or ANONYMOUS.limit)
        state = State({"headers": headers, "tenant": tenant})
        self.asked = Asked.of(self.body, state, objective, JobId("j"), arrived_s, output_tokens=40)
        only_decode = self.asked.placement.only_decode
        self.record = RequestRecord(
            Instruments(),
            Identity(JobId("j"), "r", ANONYMOUS.name, "tiny", streams=True, only_decode=only_decode),
            objective,
            arrived_s,
            ended=self.ended.append,
            tell=self.told.append,
        )

    async def place(self, placement):
        assert placement is self.asked.placement
        if isinstance(self.decision, BaseException):
            raise self.decision
        return self.decision

    async def context(self, *, shows_usage=False):
        return await admit(self, self.asked, self.record, shows_usage=shows_usage)

    @property
    def headers(self):
        return response_headers(OBJECTIVE, self.record)


def test_the_router_is_asked_for_what_was_read():
    placement = Admission(HERE, n=2).asked.placement
    assert (placement.prompt_tokens, placement.answers_per_prompt, placement.output_tokens) == (3, 2, 40)
    assert (placement.prompts, placement.answers) == (1, 2)
    assert placement.explicit_deadline
    assert placement.elapsed_s == pytest.approx(0.25, abs=0.1)


async def test_an_end_of_the_clients_own_is_told_to_the_router_and_what_is_left_of_it_to_the_others():
    objective = replace(OBJECTIVE, e2e_s=9.0)
    named = Admission(HERE, objective=objective, headers=[(E2E_HEADER, "9000")])
    assert named.asked.placement.explicit_e2e_s == 9.0
    assert (await named.context()).explicit_e2e_s == pytest.approx(8.75, abs=0.1)
    of_its_tier = Admission(HERE, objective=objective)
    assert of_its_tier.asked.placement.explicit_e2e_s is None
    assert (await of_its_tier.context()).explicit_e2e_s is None


def test_the_router_is_told_of_the_answers_to_all_prompts():
    placement = Admission(HERE, prompt=[[1, 2, 3], [4, 5]], n=2).asked.placement
    assert (placement.prompt_tokens, placement.prompts, placement.answers) == (5, 2, 4)


@pytest.mark.parametrize("prompts", [([1, 2, 3], [1, 2, 4]), ("a text", "b text")], ids=["tokens", "text"])
def test_short_prompts_that_are_as_long_are_alike_only_if_they_are_the_same(prompts):
    one, other = [Admission(HERE, prompt=prompt).asked.placement.likeness for prompt in prompts]
    assert one != other
    assert one == Admission(HERE, prompt=prompts[0]).asked.placement.likeness


@pytest.mark.parametrize(("cut", "told"), [({}, 12), ({"truncate_prompt_tokens": 2}, 0)])
async def test_only_a_text_that_is_whole_tells_how_long_such_texts_are(cut, told):
    context = await Admission(HERE, prompt="twelve bytes", **cut).context()
    assert context.prompt_bytes == told


async def test_a_place_is_named_to_the_other_processes_with_what_is_left_of_the_budget():
    context = await Admission(HERE).context()
    assert (context.prefill_replica, context.decode_replica, context.handoff_s) == (P, D, 0.1)
    assert (context.job_id, context.request_id, context.tier, context.tpot_s) == ("j", "r", STANDARD, 0.05)
    assert context.ttft_budget_s == pytest.approx(1.75, abs=0.1)


async def test_its_client_is_told_of_it_and_its_end_is_judged_by_what_was_promised():
    admission = Admission(HERE)
    await admission.context()
    assert admission.headers == {
        "x-slo-tier": STANDARD,
        "x-slo-ttft-budget-ms": "2000.0",
        "x-slo-predicted-ttft-ms": "500.0",
        "x-slo-tier-clamped-from": PREMIUM,
    }
    admission.record.end(Outcome.CANCELLED)
    assert admission.told[0].ttft_budget_s == 2.5


@pytest.mark.parametrize(
    ("placed", "header"),
    [(ON_DECODE, ("x-slo-prefilled-by", "decode")), (NO_PREFILL, ("x-slo-degraded", "local_prefill"))],
)
async def test_its_client_is_told_when_decode_computes_the_prompt(placed, header):
    admission = Admission(placed)
    assert (await admission.context()).local_prefill == placed.reason
    assert header in admission.headers.items()


async def test_what_only_decode_can_compute_is_nothing_out_of_the_ordinary():
    admission = Admission(ONLY_DECODE, prompt=["a", "b"])
    assert admission.asked.placement.only_decode
    assert (await admission.context()).local_prefill == ""
    assert not {"x-slo-prefilled-by", "x-slo-degraded"} & admission.headers.keys()


async def test_without_the_routers_answer_the_tiers_own_objective_holds_and_serve_chooses():
    admission = Admission(None)
    context = await admission.context()
    assert (context.prefill_replica, context.decode_replica, context.local_prefill) == (None, None, "")
    assert context.ttft_budget_s == pytest.approx(2.75, abs=0.1)
    assert "x-slo-predicted-ttft-ms" not in admission.headers
    admission.record.end(Outcome.CANCELLED)
    assert admission.told[0].ttft_budget_s == 3.0


async def test_a_refusal_tells_what_it_reckoned_with_and_is_no_job_of_the_routers():
    admission = Admission(LATE)
    with pytest.raises(HTTPError) as refused:
        await admission.context()
    error = refused.value
    assert (error.status, error.code, error.outcome) == (429, "deadline_infeasible", Outcome.SHED)
    assert error.headers == {
        "x-slo-tier": STANDARD,
        "x-slo-ttft-budget-ms": "2000.0",
        "x-slo-predicted-ttft-ms": "4000.0",
        "x-slo-tier-clamped-from": PREMIUM,
        "retry-after": "2",
    }
    (told,) = admission.told
    assert (told.outcome, told.ttft_budget_s) == (Outcome.SHED, 2.0)
    assert admission.ended == []


@pytest.mark.parametrize(
    ("lacked", "prompt", "told"),
    [(True, "a", True), (False, "a", False), (False, ["a", "b"], True)],
    ids=["decode's", "not decode's", "only decode can compute it"],
)
async def test_the_monitor_hears_whether_prefill_could_have_helped_a_refusal(lacked, prompt, told):
    admission = Admission(Rejected(RejectionReason.BACKLOG, 1.0, lacked_decode=lacked), prompt=prompt)
    with pytest.raises(HTTPError):
        await admission.context()
    assert admission.told[0].up_to_decode is told


@pytest.mark.parametrize("outcome", [Outcome.SHED, Outcome.CANCELLED, Outcome.FINISHED])
async def test_however_a_request_ends_that_only_decode_can_compute_it_is_none_of_prefills(outcome):
    admission = Admission(ONLY_DECODE, prompt=["a", "b"])
    await admission.context()
    admission.record.event("data: [DONE]")
    admission.record.end(outcome)
    assert admission.told[0].prefilled_in_time is None


@pytest.mark.parametrize("decision", [HERE, LATE])
async def test_the_monitor_hears_what_not_even_an_idle_fleet_would_keep(decision):
    admission = Admission(replace(decision, unattainable=(ObjectiveName.TPOT,)))
    with contextlib.suppress(HTTPError):
        await admission.context()
    admission.record.end(Outcome.FINISHED)
    assert admission.told[0].unattainable == (ObjectiveName.TPOT,)


SCALED = Objective(STANDARD, None, None, ttft_scale=4.0)


async def test_a_refusal_misses_a_multiple_of_the_prefill_that_nobody_has_worked_out():
    admission = Admission(Rejected(RejectionReason.OVER_SHARE, 1.0), objective=SCALED)
    with pytest.raises(HTTPError):
        await admission.context()
    assert admission.told[0].judged == {ObjectiveName.TTFT: False}
    assert admission.headers["x-slo-ttft-budget-ms"] == "none"


@pytest.mark.parametrize("placed", [None, replace(NO_PREFILL, ttft_budget_s=None, promised_ttft_s=None)])
@pytest.mark.parametrize(
    ("outcome", "is_met"), [(Outcome.FAILED, False), (Outcome.FINISHED, True), (Outcome.CANCELLED, None)]
)
async def test_a_promise_that_nobody_has_worked_out_is_missed_by_a_failure_alone(placed, outcome, is_met):
    admission = Admission(placed, objective=SCALED)
    assert (await admission.context()).ttft_budget_s is None
    admission.record.event("data: [DONE]")
    admission.record.end(outcome)
    (told,) = admission.told
    assert (told.attained, told.budget_used) == (is_met, None)
    assert told.judged == ({ObjectiveName.TTFT: False} if is_met is False else {})


@pytest.mark.parametrize("gone", [asyncio.CancelledError(), TaskCancelledError()], ids=repr)
async def test_a_client_that_leaves_before_there_is_a_place_is_told_to_the_router(gone):
    admission = Admission(gone)
    with pytest.raises(type(gone)):
        await admission.context()
    assert [told.outcome for told in admission.told] == [Outcome.CANCELLED]
    assert [ended.job_id for ended in admission.ended] == ["j"]


LIMITED = TenantLimit(output_tokens_per_s=10.0)


@pytest.mark.parametrize(
    ("decision", "limit", "used"),
    [(HERE, LIMITED, Usage(20, 0)), (HERE, None, None), (None, LIMITED, Usage(6, 0)), (None, None, None)],
)
async def test_what_a_limited_tenant_takes_is_metered_against_what_was_admitted(decision, limit, used):
    admission = Admission(decision, limit=limit, n=2)
    await admission.context()
    admission.record.end(Outcome.CANCELLED)
    assert admission.ended[0].used == used
    assert admission.body.stream_options.continuous_usage_stats is (used is not None)


@pytest.mark.parametrize(("limit", "used"), [(LIMITED, NO_USAGE), (None, None)])
async def test_who_leaves_before_there_is_a_place_has_taken_nothing(limit, used):
    admission = Admission(asyncio.CancelledError(), limit=limit)
    with pytest.raises(asyncio.CancelledError):
        await admission.context()
    assert admission.ended[0].used == used


async def test_a_place_that_came_too_late_to_be_heard_of_costs_what_was_generated():
    """The router has admitted a request that its ingress has sent off without it."""
    admission = Admission(None, limit=LIMITED)
    asked = admission.asked.placement
    rules = AdmissionController(DEFAULT_TIERS, AdmissionRules(), TenantGates(), lambda: 0.5)

    def decide(job_id):
        usage = Usage(3, 100)
        of = AdmissionRequest(JobId(job_id), STANDARD, asked.tenant, usage, 0.1, limit=LIMITED)
        return rules.decide(of, 0.0)

    assert decide("j") is None
    assert decide("k") is not None, "all is reserved"
    await admission.context()
    counts = '"usage":{"prompt_tokens":3,"total_tokens":8,"completion_tokens":5}'
    admission.record.event('data: {"id":"c","choices":[{"index":0,"text":"a"}],' + counts + "}\n\n")
    admission.record.end(Outcome.CANCELLED)
    (ended,) = admission.ended
    assert ended.used == Usage(3, 5)
    rules.ended(ended.job_id, 0.5, ended.used)
    assert decide("k") is None


async def test_the_length_of_a_text_is_guessed_where_the_router_has_not_said_it():
    admission = Admission(None, limit=LIMITED, prompt="a" * 400)
    await admission.context()
    admission.record.end(Outcome.CANCELLED)
    assert admission.ended[0].used == Usage(100, 0)


async def test_a_model_may_show_its_usage_to_all():
    admission = Admission(HERE)
    await admission.context(shows_usage=True)
    assert admission.body.stream_options.continuous_usage_stats
