"""What the router hears of a request whose client leaves, and what Serve hears of a replica's health."""

import asyncio
import os
import random
import socket
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve.llm.deployment import PDDecodeServer
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest
from vllm.v1.metrics.stats import IterationStats

from decode_node.handshakes import NothingPulledError
from decode_node.orchestrator import Orchestrator
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.openai_layer import OpenAILayer
from decode_node.requests.underway import Call, Underway
from decode_node.server import DecodeServer
from decode_node.spans import RequestSpans
from engine_host.places import Places
from kv_transfer import side_channel
from slo.model_digest import OTHER_MODEL, UNTOLD, ModelDigest
from slo.reports import AwaitedKv
from slo.request import CONTEXT_HEADER, JobId, Party, ReplicaId, RequestContext
from slo.tiers import DEFAULT_TIERS, STANDARD
from telemetry.engine_tap import EngineTap
from telemetry.reporting.background import Background

CONTEXT = RequestContext(JobId("job"), "request", STANDARD, None)


class Replica:
    """One that has one place, and generates a token for each piece."""

    def __init__(self, pieces=3):
        self.told, self.pieces = [], pieces
        self.server = DecodeServer.__new__(DecodeServer)
        self.server._places = Places(1, DEFAULT_TIERS)
        self.server._ongoing = 0
        self.server._reporter = SimpleNamespace(changed=lambda: None)
        self.server._background = Background()
        self.server._router = SimpleNamespace(generated=SimpleNamespace(remote=self.generated))
        self.server._answering = self
        self.server._layer = OpenAILayer(ReplicaId("d"), None)
        self.server._orchestrator = Orchestrator(*[None] * 5)

    async def generated(self, job_id, tokens):
        self.told.append((job_id, tokens))

    async def answer(self, arrived):
        for number in range(self.pieces):
            arrived.amount.take(SimpleNamespace(token_ids=[number]), is_delta=True)
            if number + 1 == self.pieces:
                await asyncio.sleep(0.01)
            yield number

    def asked(self, job_id=CONTEXT.job_id, digest=UNTOLD):
        context = replace(CONTEXT, job_id=job_id, digest=digest)
        info = SimpleNamespace(headers={CONTEXT_HEADER: context.encode()})
        return self.server._in_turn(None, info, is_chat=False)


async def test_of_an_answer_that_ends_it_hears_nothing_here():
    replica = Replica()
    assert [piece async for piece in replica.asked()] == [0, 1, 2]
    await asyncio.sleep(0.01)
    assert replica.told == []


@pytest.mark.parametrize(("begun_by", "goes_on"), [("model", True), ("other", False), ("", True)])
async def test_only_what_its_own_model_has_begun_goes_on_here(begun_by, goes_on):
    replica = Replica()
    replica.server._orchestrator = Orchestrator(*[None] * 5, digest=ModelDigest("model"))
    pieces = [piece async for piece in replica.asked(digest=ModelDigest(begun_by))]
    if goes_on:
        assert pieces == [0, 1, 2]
        return
    (refused,) = pieces
    assert (refused.error.type, refused.error.code, refused.error.param) == (OTHER_MODEL, 503, "d")
    assert replica.server._ongoing == 0


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_whose_client_leaves_has_had_what_was_generated(how):
    replica = Replica()
    if how == "closed":
        async with aclosing(replica.asked()) as pieces:
            await anext(pieces)
            await anext(pieces)
    else:

        async def run():
            async for _ in replica.asked():
                pass

        task = asyncio.create_task(run())
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert replica.told == [("job", 2 if how == "closed" else 3)]
    assert replica.server._ongoing == 0


async def test_whose_whole_answer_is_not_wanted_any_more_has_had_what_was_generated():
    """vLLM catches the cancellation, and returns an error for the client that has left."""
    replica, generated = Replica(), asyncio.Event()
    serving = OpenAIServingChat.__new__(OpenAIServingChat)
    serving.create_error_response = create_error_response

    async def chat(request, info):
        async def outputs():
            request.amount.take(SimpleNamespace(token_ids=[1, 2]), is_delta=False)
            generated.set()
            await asyncio.Event().wait()
            yield

        yield await serving.chat_completion_full_generator(request, outputs(), "", "", [], None, None)

    def answer(arrived):
        call = Call(None, None, is_chat=True, token_ids=[], spans=RequestSpans(""), amount=arrived.amount)
        engine = SimpleNamespace(chat=chat, _engine_client=SimpleNamespace(errored=False))
        return OpenAILayer(ReplicaId("a"), engine).answer(arrived, Underway(call, CONTEXT))

    replica.answer = answer

    async def run():
        return [piece async for piece in replica.asked()]

    task = asyncio.create_task(run())
    await generated.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert replica.told == [("job", 2)]
    assert replica.server._ongoing == 0


async def test_who_leaves_before_there_is_a_place_for_it_has_had_nothing():
    replica = Replica()
    async with replica.server._places.one(STANDARD):
        waiting = asyncio.create_task(anext(replica.asked()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert replica.told == [("job", 0)]


async def test_who_waits_for_a_place_and_who_is_rendered_are_among_those_whose_kv_is_awaited():
    """The router would take them for lost, and the replica for one that has room."""
    replica, rendered = Replica(), asyncio.Event()
    replica.server._replica_id, replica.server._watchdog = ReplicaId("d"), None
    replica.server._layer = SimpleNamespace(is_dead=False)
    replica.server._local = replica.server._short = LocalPrefills(1)
    replica.server._tap = EngineTap("decode", SimpleNamespace(set=lambda *_, **__: None))
    replica.server._handshakes = SimpleNamespace(has_pulled=True)

    async def answer(arrived):
        await rendered.wait()
        yield "answer"

    replica.answer = answer
    asked = [asyncio.create_task(anext(replica.asked(JobId(f"{n}")))) for n in range(5)]
    await asyncio.sleep(0.01)
    replica.server._orchestrator = replace(replica.server._orchestrator, digest=ModelDigest("model"))
    told = replica.server._report()
    assert (told.digest, told.has_pulled) == ("model", True)
    assert (told.running, told.awaited) == (5, tuple(AwaitedKv(JobId(f"{n}"), STANDARD) for n in range(5)))
    asked[3].cancel()
    await asyncio.sleep(0.01)
    told = replica.server._report()
    assert (told.running, [one.job_id for one in told.awaited]) == (4, ["0", "1", "2", "4"])
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    told = replica.server._report()
    assert (told.running, told.awaited) == (0, ())


async def test_who_fails_goes_on_elsewhere_and_nothing_is_told():
    replica = Replica()

    async def fails(arrived):
        raise ValueError("not cancelled")
        yield

    replica.answer = fails
    with pytest.raises(ValueError, match="not cancelled"):
        [piece async for piece in replica.asked()]
    await asyncio.sleep(0.01)
    assert replica.told == []


@pytest.mark.parametrize("alone", [False, True])
async def test_one_that_can_pull_nothing_is_unhealthy_unless_it_can_compute_prompts_itself(alone):
    server = DecodeServer.__new__(DecodeServer)
    server.engine = None
    server._handshakes = SimpleNamespace(failure=None)
    server._computes_prompts = alone
    await server.check_health()
    server._handshakes.failure = NothingPulledError("Internal server error")
    if alone:
        await server.check_health()
        return
    with pytest.raises(NothingPulledError, match="both tiers need the same engine_kwargs"):
        await server.check_health()


@pytest.mark.parametrize("way", ["in turn", "at once"])
async def test_a_prompt_whose_client_leaves_may_take_as_long_until_its_pass_has_ended(way):
    server = DecodeServer.__new__(DecodeServer)
    server._tap = tap = EngineTap("decode", None)
    server._local = local = LocalPrefills(1, steps=lambda: tap.steps)
    tap.step_s, short_s = 0.1, 0.4
    assert server._pass_s() == short_s

    async def request():
        if way == "at once":
            async with local.counted():
                await asyncio.Event().wait()
        async with local.claimed(Party("", STANDARD)) as claim, local.turn(claim, 10):
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0.01)
    assert (long_s := server._pass_s()) > 60 * short_s
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (local.computing, server._pass_s()) == (0, long_s)
    tap.steps += 1  # perhaps it had ended before
    assert server._pass_s() == long_s
    tap.steps += 1  # that in which the engine has heard of it
    assert server._pass_s() == short_s
    tap.steps += 1
    assert server._pass_s() == short_s


async def test_an_engine_that_rests_when_somebody_looks_may_not_take_as_long_for_what_comes_next():
    """Who leaves has the engine take its last steps between two looks."""
    server = DecodeServer.__new__(DecodeServer)
    server._tap = tap = EngineTap("decode", None)
    server._local = local = LocalPrefills(1, steps=lambda: tap.steps)
    tap.step_s = 0.1
    async with local.counted():
        pass
    tap.steps += 2
    assert server._pass_s() == 0.4


def test_a_pass_may_take_as_long_however_many_tokens_it_brings():
    server = DecodeServer.__new__(DecodeServer)
    server._tap = tap = EngineTap("decode", None)
    server._local = LocalPrefills(1, steps=lambda: tap.steps)
    tap.steps = 10
    stats = IterationStats()
    stats.inter_token_latencies_iter, stats.num_generation_tokens = [0.1, 0.1], 8
    tap.record(None, stats)
    assert server._pass_s() == pytest.approx(0.4)


async def test_a_prompt_that_has_been_computed_leaves_nothing_behind():
    local = LocalPrefills(1)
    async with local.counted() as computed:
        computed()
    assert local.given_up_after < 0


@pytest.mark.parametrize("tokens", [64, 65, 300_000])
async def test_more_tokens_than_the_model_takes_are_not_made_text_of(monkeypatch, tokens):
    asked = []

    async def detokenize(_, request, info):
        asked.append(request)
        return aiter_of("text")

    monkeypatch.setattr(PDDecodeServer, "detokenize", detokenize)
    server = DecodeServer.__new__(DecodeServer)
    server._max_model_len, server.engine = 64, None
    request = DetokenizeRequest(tokens=[1] * tokens)
    (answer,) = [piece async for piece in await server.detokenize(request)]
    if tokens == 64:
        assert (answer, asked) == ("text", [request])
        return
    assert (answer.error.code, answer.error.param, asked) == (400, "tokens", [])
    assert f"{tokens} token ids" in answer.error.message
    assert "at most 64" in answer.error.message


async def aiter_of(piece):
    yield piece


async def test_its_engine_has_the_port_and_the_cores_that_are_free_whatever_rank_serve_gives_it(monkeypatch):
    """Serve may call it the first while the first port is that of one that runs."""
    for name in ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(side_channel, "_holds", holds := [])
    context = SimpleNamespace(rank=SimpleNamespace(local_rank=0))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    seen = {}

    async def engine_dies(*_, **__):
        seen.update(os.environ)
        raise RuntimeError("the engine was killed")

    monkeypatch.setattr(PDDecodeServer, "__init__", engine_dies)
    first = random.randrange(24_000, 31_000)
    config = SimpleNamespace(engine_kwargs={}, experimental_configs={side_channel.PORT_BASE: first})
    node = SimpleNamespace(tracing=None, cores=("4", "5"))
    starting = DecodeServer.__new__(DecodeServer)
    with socket.create_server(("127.0.0.1", first)), pytest.raises(RuntimeError, match="was killed"):
        await starting.__init__(config, node=node, router=None, prefill_server=None)
    assert seen["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(first + 1)
    assert seen["VLLM_CPU_OMP_THREADS_BIND"] == "5"
    holds.pop().close()
