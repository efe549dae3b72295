"""A job is computed once for each attempt, and what is said of one attempt holds for that alone."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from governors import governor_of
from job_table import SQL, TOKEN, called, prefill
from ray.serve.llm.openai_api_models import ErrorResponse
from read_blocks import ReadBlocks
from vllm.v1.engine.input_processor import InputProcessor

from prefill_node.board.messages import Reached
from prefill_node.release import RELEASE_PREFIX, Release
from prefill_node.replica.governing.snapshot import load
from prefill_node.replica.jobs import CLIENT_CLOSED_REQUEST
from sampling.carried import KV_PARAMS, Adapter, CacheUse, Prefilled
from slo.model_digest import OTHER_MODEL, UNTOLD, ModelDigest
from slo.preemption.types import PreemptionRules
from slo.request import ENGINE_DIED, JobId, job_of
from slo.tiers import BACKGROUND, PREMIUM


async def test_it_is_sampled_as_the_client_asked_and_says_where_its_blocks_are(table, client):
    client.go.set()
    assert await prefill(table) == Prefilled(TOKEN, {"at": "prefill-job"}, "here", CacheUse(2, 1))
    ((prompt, _, params),) = client.asked
    assert (prompt, params.temperature, params.seed, params.max_tokens) == ([1, 2, 3], 0.7, 4, 1)
    assert params.extra_args[KV_PARAMS]["do_remote_decode"]
    assert not table._ledger.accepted


@pytest.mark.parametrize(
    "name",
    ["mine", "HB:mine", "HB:", "a:b:2", ":", RELEASE_PREFIX, f"{RELEASE_PREFIX}mine", "prefill-HB:mine"],
)
async def test_blocks_are_freed_once_they_are_read_whatever_a_client_calls_its_request(table, client, name):
    """Decode names the request and how many read it; to vLLM what begins with `HB:` lengthens leases."""
    client.go.set()
    answer = await prefill(table, job=f"{name}-0123456789abcdef")
    request = SimpleNamespace(request_id=answer.kv_transfer_params["at"], external_req_id=None)
    InputProcessor.assign_request_id(request)
    assert not request.request_id.startswith(RELEASE_PREFIX), "an abort of vLLM's would be a release to us"
    prefill_worker = ReadBlocks()
    prefill_worker.lease(request.request_id)
    assert prefill_worker.hear(f"HB:{request.request_id}".encode()) == set()
    assert prefill_worker.hear(f"{request.request_id}:1".encode()) == {request.request_id}
    assert not prefill_worker._ended_leases, "it did not end unread"


@pytest.mark.parametrize(
    ("second_runner", "fp64"), [(True, False), (False, True), (True, True)], ids=["runner", "width", "both"]
)
async def test_with_a_seed_nothing_is_sampled_for_a_decode_engine_that_draws_otherwise(
    table, client, second_runner, fp64
):
    client.go.set()
    client.vllm_config.use_v2_model_runner = second_runner
    client.vllm_config.model_config.use_fp64_gumbel = fp64
    assert await prefill(table) == Prefilled(None, {"at": "prefill-job"}, "here", CacheUse(2, 1))
    ((_, _, params),) = client.asked
    assert (params.temperature, params.seed, params.max_tokens) == (0.0, None, 1)
    assert params.extra_args[KV_PARAMS]["do_remote_decode"], "it is pulled all the same"


async def test_what_an_engine_that_is_being_ended_aborts_is_computed_elsewhere(table, client):
    client.go.set()
    client.token = SimpleNamespace(token_ids=[], finish_reason="abort")
    answer = await prefill(table)
    assert isinstance(answer, ErrorResponse)
    assert (answer.error.type, answer.error.code, answer.error.param) == (ENGINE_DIED, 503, "here")


async def test_nothing_is_computed_for_a_decode_replica_of_another_model(table, client):
    client.go.set()
    refused = await prefill(table, digest=ModelDigest("other"))
    assert isinstance(refused, ErrorResponse)
    assert (refused.error.type, refused.error.code, refused.error.param) == (OTHER_MODEL, 503, "here")
    assert not client.asked
    assert not table._ledger.accepted
    assert isinstance(await prefill(table, digest=UNTOLD), Prefilled)


@pytest.mark.parametrize(("tokens", "is_computed"), [(63, True), (64, False), (100, False)])
async def test_a_prompt_for_which_decode_has_room_and_this_replica_has_none_is_anothers(
    table, client, tokens, is_computed
):
    """While a configuration with a larger `max_model_len` replaces this one."""
    client.go.set()
    answer = await prefill(table, tokens=tokens)
    assert isinstance(answer, Prefilled) is is_computed
    if is_computed:
        return
    assert (answer.error.type, answer.error.code, answer.error.param) == (OTHER_MODEL, 503, "here")
    assert not client.asked
    assert not table._ledger.accepted


async def test_a_released_attempt_does_not_refuse_the_next_one_here(table, client):
    client.go.set()
    await table.release(JobId("job"))
    assert (await prefill(table)).error.code == CLIENT_CLOSED_REQUEST
    assert isinstance(await prefill(table, attempt=1), Prefilled)
    assert client.aborted == [Release("job", 0).encode()]


async def test_a_late_release_leaves_the_next_attempt_alone(table, client):
    first = asyncio.create_task(prefill(table))
    second = asyncio.create_task(prefill(table, attempt=1))
    await asyncio.sleep(0.01)
    await table.release(JobId("job"))
    assert (await first).error.code == CLIENT_CLOSED_REQUEST
    assert list(table._ledger.accepted) == ["job#1"]
    client.go.set()
    assert isinstance(await second, Prefilled)
    assert [job_of(attempt) for attempt in table._ledger.take_ended()] == ["job", "job"]


async def test_another_attempt_ends_what_is_still_computed_of_one_whose_decode_replica_was_given_up(
    table, client
):
    earlier, other = asyncio.create_task(prefill(table)), asyncio.create_task(prefill(table, job="other"))
    await asyncio.sleep(0.01)
    assert len(client.asked) == 2
    later = asyncio.create_task(prefill(table, attempt=100))
    await asyncio.sleep(0.01)
    assert (await prefill(table, attempt=1)).error.code == CLIENT_CLOSED_REQUEST, "it was given up as well"
    assert (await earlier).error.code == CLIENT_CLOSED_REQUEST
    client.go.set()
    assert isinstance(await later, Prefilled)
    assert isinstance(await other, Prefilled)
    assert not table._computing


async def test_another_attempt_ends_what_waits_for_a_place_of_an_earlier_one_too(table, client):
    jobs = [asyncio.create_task(prefill(table, job=f"{n}")) for n in range(8)]
    await asyncio.sleep(0.01)
    earlier = asyncio.create_task(prefill(table))
    await asyncio.sleep(0.01)
    later = asyncio.create_task(prefill(table, attempt=100))
    await asyncio.sleep(0.01)
    assert list(table._ledger.without_place) == ["job#100"]
    assert (await prefill(table, attempt=1)).error.code == CLIENT_CLOSED_REQUEST, "it was given up as well"
    client.go.set()
    assert isinstance(await later, Prefilled)
    assert (await earlier).error.code == CLIENT_CLOSED_REQUEST
    await asyncio.gather(*jobs)
    assert [job for _, job, _ in client.asked] == [*map(str, range(8)), "job#100"]


async def test_blocks_of_which_nobody_could_be_told_are_freed(table, client):
    client.go.set()
    breaks = called(table)
    await anext(breaks)
    await breaks.aclose()
    await asyncio.sleep(0.01)
    assert client.aborted == [Release("job", 1).encode()]
    assert not table._computing


async def test_before_a_full_replica_a_premium_job_goes_before_background_ones(table, client):
    jobs = [asyncio.create_task(prefill(table, job=f"{n}", tier=BACKGROUND)) for n in range(30)]
    await asyncio.sleep(0.01)
    jobs.append(asyncio.create_task(prefill(table, job="premium", tier=PREMIUM)))
    await asyncio.sleep(0.01)
    assert list(table._ledger.accepted) == [f"{n}" for n in range(8)]
    jobs[3].cancel()
    await asyncio.sleep(0.01)
    assert list(table._ledger.accepted)[-1] == "premium", "the governor and the router know of it"
    client.go.set()
    await asyncio.gather(*jobs, return_exceptions=True)
    assert not table._ledger.accepted


def reported(table):
    """What the router is told: the jobs and their budgets, and which have ended."""
    told = load(governor_of(table._ledger, PreemptionRules()), None, Reached(0, 0), time.monotonic())
    return {job.job_id: job for job in told.jobs}, table._ledger.take_ended()


async def test_what_waits_before_a_full_replica_is_reported_behind_what_it_has(table, client):
    """The router would take them for lost, and the replica for one that has hardly anything to do."""
    jobs = [asyncio.create_task(prefill(table, job=f"{n}", tier=BACKGROUND)) for n in range(30)]
    await asyncio.sleep(0.01)
    told, ended = reported(table)
    assert (list(told), ended) == ([f"{n}" for n in range(30)], ())
    assert told["29"].tokens == told["0"].tokens == 3
    assert told["29"].work_s == pytest.approx(0.003)
    changes = table._reporter.changed.call_count
    jobs[20].cancel()
    await asyncio.sleep(0.01)
    told, ended = reported(table)
    assert ("20" in told, ended) == (False, ("20",))
    assert table._reporter.changed.call_count > changes
    client.go.set()
    await asyncio.gather(*jobs, return_exceptions=True)
    told, ended = reported(table)
    assert (told, len(ended)) == ({}, 29)


async def test_what_is_released_before_it_has_a_place_is_not_reported_any_more(table, client):
    await table.release(JobId("8"))
    jobs = [asyncio.create_task(prefill(table, job=f"{n}")) for n in (*range(8), 9, 8)]
    await asyncio.sleep(0.01)
    await table.release(JobId("9"))
    told, ended = reported(table)
    assert (list(told), ended) == ([f"{n}" for n in range(8)], ("9",))
    client.go.set()
    answers = await asyncio.gather(*jobs)
    assert [each.error.code for each in answers[8:]] == [CLIENT_CLOSED_REQUEST] * 2
    assert sorted(reported(table)[1]) == [f"{n}" for n in range(8)]


async def test_the_governor_is_told_when_a_job_got_its_place_and_the_deadline_runs_since_it_came(table):
    """What it expects to arrive goes by times that never go back."""
    jobs = [asyncio.create_task(prefill(table, job=f"{n}", tier=BACKGROUND)) for n in range(8)]
    await asyncio.sleep(0.01)
    jobs.append(asyncio.create_task(prefill(table, job="waits")))
    await asyncio.sleep(0.1)
    jobs[0].cancel()
    await asyncio.sleep(0.01)
    told = [call.args for call in table._governor.arrived.call_args_list]
    times = [now_s for _, now_s in told]
    assert times == sorted(times)
    waited, now_s = told[-1]
    assert waited.job_id == "waits"
    assert now_s - waited.arrived_s > 0.09
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)


async def test_what_the_engine_refuses_is_answered(table, client):
    client.go.set()
    client.failure = ValueError("token id 7 is out of vocabulary")
    answer = await prefill(table)
    assert (answer.error.code, answer.error.message) == (400, "token id 7 is out of vocabulary")


async def test_the_engine_computes_with_the_adapter_that_decode_has(table, client):
    client.go.set()
    await prefill(table)
    await prefill(table, attempt=1, adapter=Adapter("sql", "/adapters/sql"))
    assert client.adapters == [None, SQL]


@pytest.mark.parametrize("adapter", [Adapter("sql", "/adapters/sql-2"), Adapter("support", "/adapters/sql")])
async def test_another_adapter_than_decodes_is_no_fault_of_the_client(table, client, adapter):
    """While a new configuration comes: the request is placed again."""
    client.go.set()
    with pytest.raises(RuntimeError, match="no LoRA adapter"):
        await prefill(table, adapter=adapter)
    assert not table._ledger.accepted
