"""Which tokens an event stands for, whatever the layer makes of the engine's outputs."""

from types import SimpleNamespace

from decode_node.answers import End, Piece
from decode_node.requests.progress import Progress
from sampling.carried import CacheUse
from slo.model_digest import ModelDigest
from slo.request import ReplicaId

ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
USAGE = 'data: {"choices":[],"usage":{}}'
DONE = "data: [DONE]"


def event(text):
    return f'data: {{"choices":[{{"index":0,"text":"{text}"}}]}}'


def output(*token_ids, end=None):
    reason, stop = end or (None, None)
    return SimpleNamespace(token_ids=token_ids, finish_reason=reason, stop_reason=stop)


def test_each_event_has_the_tokens_since_the_last():
    progress = Progress()
    progress.take(output(1))
    assert progress.piece(event("a")) == Piece(event("a"), [1])
    progress.take(output(2, 3))
    assert progress.piece(event("bc")) == Piece(event("bc"), [2, 3])
    progress.take(output(4, end=("stop", "x")))
    assert progress.piece(event("d")) == Piece(event("d"), [4], End("stop", "x"))
    assert progress.piece(USAGE) == Piece(USAGE)
    assert progress.piece(DONE) == Piece(DONE)


def test_the_first_event_says_what_of_the_prompt_was_cached_and_by_which_model_and_replica_it_is():
    progress = Progress(cache=CacheUse(16, 80), digest=ModelDigest("model"), replica=ReplicaId("d"))
    progress.take(output(1))
    assert progress.piece(ROLE) == Piece(ROLE)
    first = Piece(event("a"), [1], cache=CacheUse(16, 80), digest="model", replica="d")
    assert progress.piece(event("a")) == first
    progress.take(output(2))
    assert progress.piece(event("b")) == Piece(event("b"), [2])


def test_a_tool_parser_may_put_the_role_into_every_delta():
    progress = Progress()
    progress.take(output(1))
    said = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"said"}}]}'
    assert progress.piece(said) == Piece(said, [1])
    call = 'data: {"choices":[{"index":0,"delta":{"role":null,"tool_calls":[{"index":0}]}}]}'
    progress.take(output(2))
    assert progress.piece(call) == Piece(call, [2])


def test_a_role_comes_before_the_text_of_its_token():
    progress = Progress()
    progress.take(output(1))
    assert progress.piece(ROLE) == Piece(ROLE)
    assert progress.piece(event("a")) == Piece(event("a"), [1])


def test_tokens_without_an_event_of_their_own_come_with_the_next():
    progress = Progress()
    progress.take(output(1))
    progress.take(output(2))
    assert progress.piece(event("ab")) == Piece(event("ab"), [1, 2])


def test_events_that_the_client_has_are_left_out():
    progress = Progress(known=3)
    progress.take(output(1, 2, 3))
    assert progress.piece(ROLE) is None
    assert progress.piece(event("abc")) is None
    progress.take(output(4))
    assert progress.piece(event("d")) == Piece(event("d"), [4])


def test_after_an_answer_that_had_ended_only_what_follows_it_is_sent():
    progress = Progress(known=2)
    progress.take(output(1, 2, end=("stop", None)))
    assert progress.piece(event("ab")) is None
    assert progress.piece(USAGE) == Piece(USAGE)
    assert progress.piece(DONE) == Piece(DONE)


def test_what_binds_a_stream_is_said_with_its_tokens():
    progress = Progress(bound="grammar")
    progress.take(output(1))
    assert progress.piece(event("a")).bound == "grammar"
