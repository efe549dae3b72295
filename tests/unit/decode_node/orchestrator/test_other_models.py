"""No answer is of two models: what prefill replicas of another one refuse is computed elsewhere, or here."""

import pytest
from played_replicas import (
    ANSWER,
    CASES,
    PROMPT,
    STREAMED,
    A,
    B,
    Counts,
    Play,
    called,
    context,
    orchestrator,
    serve,
)

from decode_node.answers import Piece
from decode_node.requests.local_prefills import LocalPrefills
from slo.errors import Rejected, RejectionReason
from slo.model_digest import ModelDigest
from slo.replacement import FailureCause, Replaced

MODEL = ModelDigest("model")


class Asked(Play):
    """Notes what prefill replicas are asked for, and answers with events as vLLM's are."""

    async def completions(self, request, info):
        async for event in super().completions(request, info):
            yield event.replace("data: ", 'data: {"choices":[{"index":0,"text":"') + '"}]}'

    async def prefill(self, asked, info, context):
        self.digests = [*getattr(self, "digests", ()), asked.digest]
        return await super().prefill(asked, info, context)


async def test_prefill_replicas_and_the_ingress_are_told_which_model_goes_on():
    steps = Asked({A: ANSWER})
    served = orchestrator(steps, digest=MODEL)
    pieces = [piece async for piece in served.run(called(), context())]
    assert steps.digests == [MODEL]
    told = [piece.digest for piece in pieces if isinstance(piece, Piece) and piece.token_ids]
    assert told[0] == MODEL
    assert not any(told[1:]), "the ingress knows"


@CASES
async def test_what_a_replica_of_another_model_refuses_is_placed_elsewhere(request_, answer):
    counts = Counts()
    steps = Play({A: FailureCause.OTHER_MODEL, B: ANSWER}, [Replaced(B, 0.1)])
    assert await serve(steps, counts, request=request_) == answer
    (asked,) = steps.asked
    assert (asked.failed_replicas, asked.lost_replica) == ((A,), None), "it serves others"
    assert counts["other_model", "router"] == 1


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("place", [Rejected(RejectionReason.NO_REPLICA, 1.0), TimeoutError()])
async def test_where_no_other_is_known_decode_computes_it(limit, place):
    counts = Counts()
    steps = Play({A: FailureCause.OTHER_MODEL}, [place], serve=A)
    steps.at_home = ANSWER
    assert await serve(steps, counts, limit=limit, local=LocalPrefills(1)) == STREAMED
    assert steps.prompts == [PROMPT]
    assert counts["other_model", "local"] == 1


async def test_where_decode_may_not_it_ends_with_an_error():
    steps = Play({A: FailureCause.OTHER_MODEL}, [TimeoutError(), TimeoutError()], serve=A)
    (refused,) = await serve(steps)
    assert (refused.error.code, refused.error.type) == (503, "prefill_failed")


NOBODY = Rejected(RejectionReason.NO_REPLICA, 1.0)


@pytest.mark.parametrize(
    ("plays", "places", "attempt", "kind"),
    [
        ({A: FailureCause.OTHER_MODEL}, [NOBODY], 0, "no_replica"),
        ({A: FailureCause.OTHER_MODEL, B: FailureCause.OTHER_MODEL}, [None, NOBODY], 0, "no_replica"),
        ({A: FailureCause.OTHER_MODEL, B: FailureCause.REPLICA_DIED}, [None, NOBODY], 0, "prefill_failed"),
        ({A: FailureCause.REPLICA_DIED, B: FailureCause.OTHER_MODEL}, [None, NOBODY], 0, "prefill_failed"),
        ({A: FailureCause.OTHER_MODEL}, [NOBODY], 100, "prefill_failed"),
    ],
    ids=["one", "one after the other", "one that is lost then", "one after a loss", "after a loss of decode"],
)
async def test_where_decode_may_not_what_none_has_computed_says_that_there_is_none(
    plays, places, attempt, kind
):
    (refused,) = await serve(Play(plays, places), attempt=attempt)
    assert (refused.error.code, refused.error.type) == (503, kind)
