"""An answer goes on elsewhere when its replica fails; what cannot ends in our own words."""

import asyncio

import pytest
from played_calls import call_of, call_until
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import RequestCancelledError
from ray.serve.llm.openai_api_models import CompletionRequest, ErrorResponse

from decode_node.answers import REQUEST_FAILED, Piece
from deployments.http.continuing.decode_tier import DecodeTier
from deployments.http.continuing.delivered import Delivered
from deployments.http.continuing.stream_watch import DecodeFailedError, StreamWatch
from deployments.http.errors import HTTPError
from deployments.http.placing.asked import Asked
from router.messages import Placed, PlacementReason, PlacementRequested
from sampling.carried import CARRIED_XARG
from slo.errors import Rejected, RejectionReason
from slo.model_digest import OTHER_MODEL, ModelDigest
from slo.objectives import Objective
from slo.replacement import FailureCause
from slo.request import ENGINE_DIED, JobId, ReplicaId, RequestContext
from slo.tiers import STANDARD

P, A, B, C = (ReplicaId(name) for name in "pabc")
NOBODY = Rejected(RejectionReason.NO_REPLICA, 10.0)
DIED = ActorDiedError()
NONE_THERE = DecodeFailedError(FailureCause.NO_REPLICA)
BODY = CompletionRequest(model="tiny", prompt="a", stream=True)


def event(number, **more):
    return Piece(f'data: {{"choices":[{{"text":"{number}"}}]}}', [number], **more)


DONE = Piece("data: [DONE]")
ROLE = Piece('data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}')


def error(kind, code=500, replica=None):
    return ErrorResponse(error={"message": "it broke", "type": kind, "code": code, "param": replica})


def placed(decode):
    return Placed(P, decode, 10, 2.0, 0.5, 1.5, 0.1, PlacementReason.NOBODY_LATE)


class Fleet:
    """Replays what each decode replica sends; it is the router, the handle and the metrics as well."""

    def __init__(self, plays, places=()):
        self.plays, self.places = plays, list(places)
        self.asked, self.sent, self.counted, self.cancelled, self.told_lost = [], [], [], [], []
        self.accepting = {}
        self.watch = StreamWatch(self.is_well, 1.0, 5.0)

    async def is_well(self, replica):
        return None

    async def place(self, request):
        self.asked.append(request)
        return self.places.pop(0)

    def lost(self, replica):
        self.told_lost.append(replica)

    def send(self, body, context):
        self.sent.append((body, context))
        replica = context.decode_replica
        if (accepted := self.accepting.get(replica)) is not None:
            return call_until(accepted)
        return call_of(Responses(self, replica))

    def count(self, metric, **labels):
        self.counted.append(tuple(labels.values()))

    async def answer(self, limit=2, at=A):
        tier = DecodeTier(self, self.watch, limit, self)
        asked = Asked(
            BODY,
            PlacementRequested(
                JobId("j"),
                Objective(STANDARD, 2.0, None),
                explicit_deadline=False,
                prompt_tokens=10,
                prompt_bytes=0,
            ),
            0.0,
        )
        context = RequestContext(
            JobId("j"),
            "r",
            STANDARD,
            2.0,
            prefill_replica=P,
            decode_replica=at,
            prompt_bytes=400,
            explicit_deadline=True,
            explicit_e2e_s=9.0,
        )
        self.got = []
        async for piece in tier.answer(asked, context, self.send, Delivered()):
            self.got.append(piece)
        return self.got


class Responses:
    def __init__(self, fleet, replica):
        self.fleet, self.replica = fleet, replica
        self.pieces = iter(fleet.plays[replica])

    async def __anext__(self):
        piece = next(self.pieces, None)
        if isinstance(piece, float):
            await asyncio.sleep(piece)
            piece = next(self.pieces, None)
        if piece is None:
            raise StopAsyncIteration
        if isinstance(piece, Exception):
            raise piece
        return piece

    def cancel(self):
        self.fleet.cancelled.append(self.replica)


FAILURES = pytest.mark.parametrize(
    ("failure", "cause"), [(DIED, "replica_died"), (error(ENGINE_DIED), "engine_died")]
)


@pytest.mark.parametrize("replicas", [RuntimeError("a bug"), RayTaskError("f", "", RuntimeError("a bug"))])
async def test_a_replicas_own_exception_has_the_request_go_on_elsewhere(replicas):
    """Over gRPC, Serve raises it as it is."""
    fleet = Fleet({A: [event(1), replicas], B: [event(2), DONE]}, [placed(B)])
    assert await fleet.answer() == [event(1).text, event(2).text, DONE.text]
    assert fleet.counted == [("request_failed", "continued")]
    (asked,) = fleet.asked
    assert (asked.failed_replicas, asked.lost_replica) == ((A,), None), "it goes on serving others"


async def test_a_request_that_its_client_has_cancelled_goes_on_nowhere():
    fleet = Fleet({A: [event(1), RequestCancelledError("r")]})
    with pytest.raises(RequestCancelledError):
        await fleet.answer()
    assert (fleet.asked, fleet.counted) == ([], [])


@pytest.mark.parametrize("leaves", ["its client", "the watch"])
async def test_a_call_that_is_accepted_just_as_it_is_left_is_cancelled(leaves):
    """Its replica would compute the answer for nobody."""
    fleet = Fleet({A: [], B: [event(1), DONE]}, [placed(B)])
    fleet.accepting[A] = accepted = asyncio.get_running_loop().create_future()
    answering = asyncio.create_task(fleet.answer())
    await asyncio.sleep(0)
    if leaves == "the watch":
        (waiting,) = fleet.watch._waiting[A]
        waiting.give_up(FailureCause.SILENT)
    accepted.set_result(Responses(fleet, A))
    if leaves == "its client":
        answering.cancel()
    await asyncio.wait([answering])
    assert fleet.cancelled == [A]
    assert answering.cancelled() == (leaves == "its client")


async def test_what_the_last_replica_had_not_accepted_as_it_went_was_begun_by_nobody():
    async def none_there(_):
        return FailureCause.NO_REPLICA

    fleet = Fleet({}, [NOBODY])
    fleet.accepting[A] = asyncio.get_running_loop().create_future()
    fleet.watch = StreamWatch(none_there, 0.01, 0.05)
    with pytest.raises(HTTPError) as refused:
        await asyncio.wait_for(fleet.answer(), 2.0)
    assert (refused.value.status, refused.value.code) == (503, "no_replica")
    assert fleet.accepting[A].cancelled()


@FAILURES
async def test_a_stream_goes_on_where_it_was(failure, cause):
    fleet = Fleet({A: [event(1), event(2), failure], B: [event(3), DONE]}, [placed(B)])
    assert await fleet.answer() == [event(1).text, event(2).text, event(3).text, DONE.text]
    assert fleet.counted == [(cause, "continued")]
    assert fleet.cancelled == [A]
    (asked,) = fleet.asked
    assert (asked.failed_replicas, asked.lost_replica) == ((A,), A)
    assert (asked.is_admitted, asked.however_late, asked.elapsed_s) == (True, True, 0.0)
    assert (asked.prompt_tokens, asked.answered_tokens) == (10, 2)
    (first, _), (body, context) = fleet.sent
    assert first is BODY
    assert body.vllm_xargs[CARRIED_XARG]["token_ids"] == [1, 2]
    assert (context.decode_replica, context.failed_replicas, context.attempt) == (B, (A,), 100)
    assert context.prompt_bytes == 0, "the prompt has what was answered in it"
    assert (context.explicit_deadline, context.explicit_e2e_s) == (False, None), "no deadline ends it"


@pytest.mark.parametrize(("bound", "limit"), [("parser", 2), (None, 0), (None, 2)])
async def test_only_what_can_go_on_elsewhere_leaves_a_replica_on_suspicion(bound, limit):
    asked = []

    async def silent_at_first(replica):
        asked.append(replica)
        await asyncio.sleep(60.0 if len(asked) == 1 else 0.0)

    fleet = Fleet({A: [event(1, bound=bound), 0.5, event(2), DONE], B: [event(3), DONE]}, [placed(B)])
    fleet.watch = StreamWatch(silent_at_first, 0.01, 0.05)
    leaves = bound is None and limit > 0
    assert await fleet.answer(limit) == [event(1).text, event(3 if leaves else 2).text, DONE.text]
    assert fleet.counted == ([("silent", "continued")] if leaves else [])


@FAILURES
async def test_before_the_first_token_it_begins_elsewhere(failure, cause):
    fleet = Fleet({A: [failure], B: [event(1), DONE]}, [placed(B)])
    assert await fleet.answer() == [event(1).text, DONE.text]
    assert fleet.counted == [(cause, "restarted")]
    assert fleet.sent[1][0] is BODY
    assert fleet.asked[0].elapsed_s > 0
    assert fleet.asked[0].answered_tokens == 0


async def test_it_fails_again_and_goes_on_again():
    fleet = Fleet({A: [event(1), DIED], B: [event(2), DIED], C: [event(3), DONE]}, [placed(B), placed(C)])
    assert await fleet.answer() == [event(1).text, event(2).text, event(3).text, DONE.text]
    assert fleet.sent[2][0].vllm_xargs[CARRIED_XARG]["token_ids"] == [1, 2]
    assert (fleet.sent[2][1].failed_replicas, fleet.sent[2][1].attempt) == ((A, B), 200)


@pytest.mark.parametrize(
    ("pieces", "places", "limit", "code", "outcome"),
    [
        pytest.param([event(1), DIED], [NOBODY], 2, "decode_failed", "no_replica", id="nobody"),
        pytest.param([event(1), DIED], [], 0, "decode_failed", "limit", id="too often"),
        pytest.param([event(1, bound="grammar"), DIED], [], 2, "decode_failed", "grammar", id="bound"),
        pytest.param([error(REQUEST_FAILED)], [NOBODY], 2, "engine_error", "no_replica", id="one request"),
    ],
)
async def test_what_cannot_go_on_ends_with_an_error_of_ours(pieces, places, limit, code, outcome):
    fleet = Fleet({A: pieces}, places)
    with pytest.raises(HTTPError) as refused:
        await fleet.answer(limit)
    assert refused.value.code == code
    assert fleet.counted[0][1] == outcome
    assert len(fleet.got) == len(pieces) - 1
    said = [request.lost_replica for request in fleet.asked] + fleet.told_lost
    assert said == [A if DIED in pieces else None], "the router hears of a lost replica once"


@pytest.mark.parametrize(
    ("plays", "places", "code"),
    [
        ({A: [NONE_THERE]}, [NOBODY], "no_replica"),
        ({A: [DIED]}, [NOBODY], "decode_failed"),
        ({A: [DIED], None: [NONE_THERE]}, [None, NOBODY], "decode_failed"),
        ({A: [event(1), NONE_THERE]}, [NOBODY], "decode_failed"),
        ({A: [ROLE, NONE_THERE]}, [NOBODY], "decode_failed"),
    ],
    ids=["nobody", "the only one", "one that Serve would have replaced", "one that drains", "who speaks"],
)
async def test_no_replica_is_said_of_what_no_replica_has_had_alone(plays, places, code):
    """What was begun and lost may have ended its replica; who sends it again must know."""
    with pytest.raises(HTTPError) as refused:
        await Fleet(plays, places).answer()
    assert (refused.value.status, refused.value.code) == (503, code)
    assert refused.value.headers == {"retry-after": "10"}


OLD = ModelDigest("old")


@FAILURES
async def test_a_stream_goes_on_with_the_model_that_has_begun_it(failure, cause):
    fleet = Fleet({A: [event(1, digest=OLD), event(2), failure], B: [event(3), DONE]}, [placed(B)])
    assert await fleet.answer() == [event(1).text, event(2).text, event(3).text, DONE.text]
    (asked,) = fleet.asked
    assert asked.digest == OLD
    assert [context.digest for _, context in fleet.sent] == ["", OLD]


async def test_what_has_not_begun_begins_with_any_model():
    fleet = Fleet({A: [DIED], B: [event(1, digest=OLD), DONE]}, [placed(B)])
    assert await fleet.answer() == [event(1).text, DONE.text]
    assert (fleet.asked[0].digest, fleet.sent[1][1].digest) == ("", "")


async def test_where_a_replica_serves_another_model_it_goes_on_on_a_third():
    fleet = Fleet(
        {A: [event(1, digest=OLD), DIED], B: [error(OTHER_MODEL, 503)], C: [event(2), DONE]},
        [placed(B), placed(C)],
    )
    assert await fleet.answer() == [event(1).text, event(2).text, DONE.text]
    assert [request.digest for request in fleet.asked] == [OLD, OLD]
    assert (fleet.asked[1].failed_replicas, fleet.asked[1].lost_replica) == ((A, B), None)
    assert fleet.counted == [("replica_died", "continued"), ("other_model", "continued")]


@pytest.mark.parametrize(("places", "retry_after"), [([placed(B), NOBODY], "10"), ([None, None], "1")])
async def test_a_stream_whose_model_nobody_serves_any_more_ends_with_an_error(places, retry_after):
    refused = [error(OTHER_MODEL, 503)]
    fleet = Fleet({A: [event(1, digest=OLD), DIED], B: refused, None: refused}, places)
    with pytest.raises(HTTPError) as failed:
        await fleet.answer()
    assert (failed.value.status, failed.value.code) == (503, "decode_failed")
    assert failed.value.headers == {"retry-after": retry_after}
    assert fleet.got == [event(1).text]


async def test_a_replica_that_fails_after_the_last_event_does_no_harm():
    fleet = Fleet({A: [event(1), DONE, DIED]})
    assert await fleet.answer() == [event(1).text, DONE.text]
    assert fleet.counted == []


async def test_a_bound_stream_that_has_not_begun_begins_elsewhere():
    fleet = Fleet({A: [DIED], B: [event(1, bound="grammar"), DONE]}, [placed(B)])
    assert await fleet.answer() == [event(1).text, DONE.text]


@pytest.mark.parametrize("at", [None, C], ids=["without the router", "one that is gone"])
@pytest.mark.parametrize(
    ("kind", "lost"), [(ENGINE_DIED, A), (REQUEST_FAILED, None), (OTHER_MODEL, None)], ids=str
)
async def test_a_replica_of_serves_choice_that_says_it_fails_is_not_chosen_again(kind, lost, at):
    """One whose engine has died is the least busy one."""
    fleet = Fleet({at: [error(kind, replica=A)], B: [event(1), DONE]}, [placed(B)])
    assert await fleet.answer(at=at) == [event(1).text, DONE.text]
    (asked,) = fleet.asked
    assert (asked.failed_replicas, asked.lost_replica) == ((A,), lost)
    assert fleet.sent[1][1].failed_replicas == (A,)


@pytest.mark.parametrize("at", [None, C], ids=["without the router", "one that is gone"])
@pytest.mark.parametrize(("broken", "lost"), [(DIED, A), (RuntimeError("a bug"), None)], ids=["died", "bug"])
async def test_whoever_a_stream_has_named_is_to_blame_when_its_call_breaks(broken, lost, at):
    first = event(1, replica=A)
    fleet = Fleet({at: [first, event(2), broken], B: [event(3), DIED], A: [DONE]}, [placed(B), placed(A)])
    assert await fleet.answer(at=at) == [first.text, event(2).text, event(3).text, DONE.text]
    again, once_more = fleet.asked
    assert (again.failed_replicas, again.lost_replica) == ((A,), lost)
    assert (once_more.failed_replicas, once_more.lost_replica) == ((A, B), B), "it has named nobody"


async def test_without_the_router_serve_chooses_another():
    fleet = Fleet({A: [event(1), DIED], None: [event(2), DONE]}, [None])
    assert await fleet.answer() == [event(1).text, event(2).text, DONE.text]
    assert fleet.sent[1][1].prefill_replica is None
    assert fleet.sent[1][1].failed_replicas == (A,)


@pytest.mark.parametrize("refusal", [error("BadRequestError", 400), error("prefill_failed", 503)])
async def test_what_the_request_or_the_prefill_tier_is_to_blame_for_is_answered(refusal):
    fleet = Fleet({A: [refusal]})
    assert await fleet.answer() == [refusal]
    assert fleet.counted == []
