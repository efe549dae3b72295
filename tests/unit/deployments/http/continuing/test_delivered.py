"""What a client has got, and what another replica is asked for."""

import pytest
from ray.serve.llm.openai_api_models import CompletionRequest

from decode_node.answers import End, Piece
from deployments.http.continuing.delivered import Delivered
from sampling.carried import CARRIED_XARG, CacheUse

ROLE = Piece('data: {"created":7,"choices":[{"index":0,"delta":{"role":"assistant"}}]}')
BODY = CompletionRequest(model="tiny", prompt="a", max_tokens=9, vllm_xargs={"own": 1})


def event(*token_ids, created=7, **more):
    return Piece(f'data: {{"created":{created},"choices":[{{"text":"a"}}]}}', list(token_ids), **more)


def carried(delivered):
    return (delivered.rest_of(BODY).vllm_xargs or {}).get(CARRIED_XARG)


def test_before_the_first_token_the_request_is_sent_as_it_was():
    delivered = Delivered()
    assert delivered.take(ROLE) == ROLE.text
    assert not delivered.has_begun
    assert delivered.rest_of(BODY) is BODY


def test_all_tokens_whose_text_was_handed_over_are_carried():
    delivered = Delivered()
    for piece in (ROLE, event(1), event(2, 3)):
        assert delivered.take(piece) == piece.text
    assert delivered.has_begun
    rest = delivered.rest_of(BODY)
    assert rest.vllm_xargs["own"] == 1
    assert rest.max_tokens == 9
    assert carried(delivered)["token_ids"] == [1, 2, 3]
    assert BODY.vllm_xargs == {"own": 1}


def test_what_of_the_prompt_was_cached_is_carried_to_every_replica():
    delivered = Delivered()
    for piece in (event(1, cache=CacheUse(16, 80)), event(2)):
        delivered.take(piece)
    assert carried(delivered)["cache"] == (16, 80)
    delivered.take(event(3, cache=CacheUse(64, 32)))
    assert carried(delivered)["cache"] == (16, 80)


def test_the_client_hears_once_who_speaks_and_when_the_answer_began():
    delivered = Delivered()
    delivered.take(ROLE)
    assert delivered.take(ROLE) is None
    assert delivered.take(event(1, created=9)) == event(1).text


def test_each_answer_of_a_request_says_once_who_speaks():
    second = Piece(ROLE.text.replace('"index":0', '"index":1'))
    delivered = Delivered()
    assert [delivered.take(piece) for piece in (ROLE, second)] == [ROLE.text, second.text]
    assert [delivered.take(piece) for piece in (ROLE, second)] == [None, None]


def test_a_text_that_looks_like_a_time_is_left_alone():
    delivered = Delivered()
    delivered.take(ROLE)
    text = 'data: {"created":9,"choices":[{"text":"\\"created\\":8"}]}'
    assert delivered.take(Piece(text)) == text.replace('"created":9', '"created":7')


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (End("length", None), ("length", None)),
        (End("stop", 17), ("stop", 17)),
        (End("repetition", "repetition_detected"), ("repetition", "repetition_detected")),
        (End("stop", "text that is looked for again"), (None, None)),
    ],
)
def test_an_answer_that_has_ended_stays_ended(end, expected):
    delivered = Delivered()
    delivered.take(event(1, end=end))
    assert (carried(delivered)["finish_reason"], carried(delivered)["stop_reason"]) == expected


def test_usage_comes_once_and_done_ends_it():
    delivered = Delivered()
    usage = Piece('data: {"choices":[],"usage":{"total_tokens":3}}')
    assert [delivered.take(piece) for piece in (event(1), usage, usage)] == [event(1).text, usage.text, None]
    assert not delivered.is_over
    assert delivered.take(Piece("data: [DONE]\n\n")) is not None
    assert delivered.is_over


def test_what_binds_it_is_known():
    delivered = Delivered()
    delivered.take(event(bound="grammar"))
    assert (delivered.has_begun, delivered.bound) == (True, "grammar")
