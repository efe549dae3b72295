"""Until its first token has been sent, a request whose prefill fails is prefilled elsewhere."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from vllm.exceptions import GenerationError

from decode_node.orchestrator import Call, NotReplacedError, Orchestrator
from decode_node.prefill_health import PrefillFailedError, PrefillWatch
from slo.errors import Rejected, RejectionReason
from slo.replacement import (
    FailureCause,
    Replaced,
    ReplacementOutcome,
    ReplacementRules,
)
from slo.request import JobId, ReplicaId, RequestContext
from slo.tiers import PREMIUM, STANDARD

A, B, C, D = (ReplicaId(name) for name in "abcd")
ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = 'data: {"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}]}\n\n'
TEXT = 'data: {"choices":[{"index":0,"text":"one","finish_reason":null}]}\n\n'
DONE = "data: [DONE]\n\n"
WHOLE = {"choices": [{"text": "one two"}]}


def server_error(message="Internal server error"):
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return "data: " + json.dumps({"error": error}) + "\n\n"


@dataclass
class Refused:
    """What an engine answers instead of streaming."""

    error: SimpleNamespace


REQUEST = SimpleNamespace(model="m", request_id="request")
PROMPT = list(range(100))


def refusal(code=400):
    return Refused(SimpleNamespace(message="too long", type="BadRequestError", code=code))


class Prefilled:
    error = None


class Play:
    """Plays what happens at each replica: a cause of failure, an error, or the pieces that decode gives.

    It is the prefill tier, the decode engine, the router, and what writes the requests of both tiers.
    """

    def __init__(self, plays, places=(), *, serve=B):
        self.plays = plays
        self.places = list(places)
        self.serve = serve
        self.asked, self.contexts, self.released, self.prompts = [], [], [], []
        self.dead = False
        self.replace = SimpleNamespace(remote=self.place)

    def prepare_prefill_request(self, *, request, peer):
        return request

    def prepare_decode_request(self, *, request, peer, prefill_response):
        assert isinstance(prefill_response, Prefilled)
        return request

    async def prefill(self, request, info, context):
        self.prompts.append(request.prompt)
        self.contexts.append(context)
        replica = context.prefill_replica or self.serve
        self.at = self.plays[replica]
        if isinstance(self.at, FailureCause):
            raise PrefillFailedError(self.at, replica)
        if isinstance(self.at, Refused):
            return self.at, replica
        if self.at is None:
            await asyncio.Event().wait()
        return Prefilled(), replica

    @property
    def _engine_client(self):
        return SimpleNamespace(errored=self.dead)

    async def completions(self, request, info):
        assert request is REQUEST
        for piece in self.at:
            if piece is None:
                await asyncio.Event().wait()
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def place(self, request):
        self.asked.append(request)
        place = self.places.pop(0)
        if isinstance(place, Exception):
            raise place
        return place

    def release(self, context):
        self.released.append(context.prefill_replica)


class Counts(dict):
    def count(self, metric, **labels):
        key = labels["cause"], labels["outcome"]
        self[key] = self.get(key, 0) + 1


def context(**given):
    values = {"tier": STANDARD, "ttft_budget_s": 2.0, "prefill_replica": A, "prompt_bytes": 400, **given}
    return RequestContext(JobId("job"), "request", **values)


async def serve(steps, counts=None, limit=2, ask=None, **given):
    async def nothing_wrong(_):
        return None

    watch = PrefillWatch(ask or nothing_wrong, 0.01, 0.05)
    rules = ReplacementRules(limit, frozenset({STANDARD}))
    counts = Counts() if counts is None else counts
    orchestrator = Orchestrator(D, steps, steps, steps, watch, steps, 1.0, rules, counts)
    call = Call(REQUEST, None, is_chat=False, token_ids=PROMPT)
    async with aclosing(orchestrator.run(call, context(**given))) as pieces:
        return [piece async for piece in pieces]


async def test_a_request_that_nothing_happens_to_passes_untouched():
    steps = Play({A: [ROLE, TOKEN, DONE]})
    assert await serve(steps) == [ROLE, TOKEN, DONE]
    assert steps.asked == []
    assert steps.released == []
    assert steps.prompts == [PROMPT]


@pytest.mark.parametrize("pieces", [[ROLE, TOKEN, DONE], [TEXT, DONE], [[ROLE], [TOKEN], [DONE]], [WHOLE]])
@pytest.mark.parametrize("lost", [FailureCause.REPLICA_DIED, FailureCause.ENGINE_DIED])
async def test_before_or_during_the_prefill_the_router_finds_another_place(pieces, lost):
    counts = Counts()
    steps = Play({A: lost, B: pieces}, [Replaced(B, 0.3)])
    assert await serve(steps, counts) == pieces
    assert [one.prefill_replica for one in steps.contexts] == [A, B]
    assert counts == {(lost.value, "router"): 1}
    (asked,) = steps.asked
    assert (asked.failed_replicas, asked.cause, asked.decode_replica, asked.tokens) == ((A,), lost, D, 100)
    assert asked.ttft_budget_s == pytest.approx(2.0, abs=0.2)
    again = steps.contexts[1]
    assert (again.handoff_s, again.failed_replicas, again.prompt_bytes) == (0.3, (A,), 0)
    assert again.ttft_budget_s <= asked.ttft_budget_s


@pytest.mark.parametrize(
    "failed",
    [
        [server_error(), DONE],
        [[server_error()], [DONE]],
        [ROLE, server_error(), DONE],
        [[ROLE, server_error()], DONE],
        [refusal(500)],
    ],
)
async def test_a_failed_pull_sends_the_client_nothing_of_the_first_try(failed):
    counts = Counts()
    steps = Play({A: failed, B: [ROLE, TOKEN, DONE]}, [Replaced(B, 0.1)])
    assert await serve(steps, counts) == [ROLE, TOKEN, DONE]
    assert counts == {("pull_failed", "router"): 1}
    assert steps.released == [A]


async def test_after_the_first_token_an_error_ends_the_answer():
    steps = Play({A: [ROLE, TOKEN, server_error(), DONE]})
    assert await serve(steps) == [ROLE, TOKEN, server_error(), DONE]
    assert steps.asked == []


async def test_a_dead_decode_engine_is_not_the_prefills_fault():
    steps = Play({A: [server_error(), DONE]})
    steps.dead = True
    assert await serve(steps) == [server_error(), DONE]
    assert steps.asked == []


async def test_an_engine_that_fails_without_streaming_answers_with_an_error():
    steps = Play({A: [GenerationError("out of memory")]})
    steps.dead = True
    (answer,) = await serve(steps)
    assert (answer.error.code, answer.error.type) == (500, "engine_error")


async def test_what_the_engines_refuse_is_refused():
    for refused in ({A: refusal()}, {A: [refusal()]}):
        steps = Play(refused)
        (answer,) = await serve(steps)
        assert answer.error.code == 400
        assert steps.asked == []


async def test_without_the_router_serve_chooses_and_avoids_the_lost_replica():
    counts = Counts()
    steps = Play({A: FailureCause.REPLICA_DIED, B: [TEXT]}, [RuntimeError("the router has died")])
    assert await serve(steps, counts) == [TEXT]
    again = steps.contexts[1]
    assert (again.prefill_replica, again.failed_replicas) == (None, (A,))
    assert counts == {("replica_died", "serve"): 1}


async def test_a_router_that_has_just_started_or_would_let_nobody_in_does_not_end_an_admitted_request():
    for reason in (RejectionReason.NOT_SETTLED, RejectionReason.OVER_SHARE):
        steps = Play({A: FailureCause.REPLICA_DIED, B: [TEXT]}, [Rejected(reason, 1.0)])
        assert await serve(steps) == [TEXT]


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_it_is_placed_again_so_many_times_and_then_refused(limit):
    counts = Counts()
    dying = dict.fromkeys((A, B, C), FailureCause.REPLICA_DIED)
    steps = Play(dying, [Replaced(B, 0.1), Replaced(C, 0.1)])
    with pytest.raises(NotReplacedError, match="try again") as refused:
        await serve(steps, counts, limit=limit)
    assert refused.value.outcome is ReplacementOutcome.LIMIT
    assert len(steps.contexts) == limit + 1
    assert counts[("replica_died", "limit")] == 1
    assert [request.failed_replicas for request in steps.asked] == [(A,), (A, B)][:limit]


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (RejectionReason.NO_REPLICA, ReplacementOutcome.NO_REPLICA),
        (RejectionReason.DEADLINE_INFEASIBLE, ReplacementOutcome.DEADLINE),
    ],
)
async def test_it_is_refused_for_what_the_router_says(reason, outcome):
    steps = Play({A: FailureCause.REPLICA_DIED}, [Rejected(reason, 1.0)])
    with pytest.raises(NotReplacedError) as refused:
        await serve(steps)
    assert refused.value.outcome is outcome


async def test_a_named_deadline_that_has_passed_is_not_even_asked_for():
    steps = Play({A: FailureCause.REPLICA_DIED})
    with pytest.raises(NotReplacedError, match="x-slo-ttft-ms"):
        await serve(steps, ttft_budget_s=-1.0, explicit_deadline=True)
    assert steps.asked == []


@pytest.mark.parametrize("given", [{"tier": PREMIUM, "ttft_budget_s": -1.0}, {"ttft_budget_s": None}])
async def test_those_who_may_not_be_shed_or_have_no_deadline_are_always_placed_again(given):
    steps = Play({A: FailureCause.REPLICA_DIED, B: [TEXT]}, [Replaced(B, 0.1)])
    assert await serve(steps, explicit_deadline=True, **given) == [TEXT]


@pytest.mark.parametrize("stuck", [None, [None]])
async def test_a_replica_that_falls_silent_in_prefill_or_pull_is_left(stuck):
    async def silent(replica):
        if replica == A:
            await asyncio.Event().wait()

    counts = Counts()
    steps = Play({A: stuck, B: [TEXT]}, [Replaced(B, 0.1)])
    assert await asyncio.wait_for(serve(steps, counts, ask=silent), 3) == [TEXT]
    assert counts == {("silent", "router"): 1}
    assert steps.released == [A], "it may live, and then has the work for nothing"


async def test_nobody_there_at_all():
    async def nobody(_):
        return FailureCause.NO_REPLICA

    steps = Play({B: None}, [None])
    with pytest.raises(NotReplacedError, match="no prefill replica is running"):
        await serve(steps, ask=nobody, prefill_replica=None)


async def test_a_client_that_leaves_releases_the_prefill():
    steps = Play({A: None})
    task = asyncio.create_task(serve(steps))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.released == [A]
