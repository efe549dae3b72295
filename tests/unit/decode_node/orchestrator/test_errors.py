"""What ends an answer with an error, or refuses it, and is not placed again."""

import pytest
from played_replicas import (
    ABORTS,
    ANSWER,
    CASES,
    FAILED,
    FIRST,
    PROMPT,
    REJECTS,
    RESAMPLED,
    SECOND,
    STREAMED,
    TAKES_LONG,
    THIRD,
    WHOLE,
    A,
    D,
    Play,
    Request,
    called,
    context,
    orchestrator,
    read,
    refusal,
    serve,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from benchmarks.harness.tiny_models import build_tiny_llama
from decode_node.answers import ENDED_BY_GRAMMAR, REQUEST_FAILED, error_response
from decode_node.requests.local_prefills import LocalPrefills
from decode_node.requests.only_here import admitted
from slo.request import ENGINE_DIED, TENANT_XARG


@CASES
async def test_an_answer_that_an_ending_engine_aborts_fails_and_is_not_whole(request_, answer):
    steps = Play({A: [[FIRST], ABORTS] if request_ is RESAMPLED else [ABORTS]})
    *_, last = await serve(steps, request=request_)
    assert last.error.type == REQUEST_FAILED


async def test_after_the_second_token_an_error_ends_the_answer():
    steps = Play({A: [[SECOND], FAILED]})
    *pieces, failed = await serve(steps)
    assert pieces == STREAMED[:2]
    assert (failed.error.type, failed.error.message) == ("engine_error", "Internal server error")
    assert steps.asked == []


async def test_when_it_cannot_go_on_a_stream_ends_with_our_error_and_nothing_else():
    steps = Play({A: [FAILED]}, [None])
    pieces = await serve(steps, limit=0)
    assert pieces[0] == STREAMED[0]
    (answer,) = pieces[1:]
    assert (answer.error.code, answer.error.type) == (503, "prefill_failed")


async def test_a_dead_decode_engine_is_not_the_prefills_fault():
    steps = Play({A: [GenerationError("dead")]})
    steps._engine_client.errored = True
    *pieces, failed = await serve(steps)
    assert pieces == STREAMED[:1]
    assert (failed.error.type, failed.error.param) == (ENGINE_DIED, D)
    assert steps.asked == []


async def test_an_engine_that_fails_without_streaming_answers_with_an_error():
    steps = Play({A: [GenerationError("out of memory")]})
    (answer,) = await serve(steps, request=WHOLE)
    assert (answer.error.code, answer.error.type) == (500, "engine_error")


@pytest.mark.slow
async def test_what_vllm_refuses_on_decode_is_refused_before_its_prompt_is_prefilled(tmp_path):
    config = EngineArgs(str(build_tiny_llama(tmp_path / "tiny")), max_model_len=128).create_engine_config()
    steps = Play({A: ANSWER})
    steps._engine_client.input_processor = InputProcessor(config)
    assert await serve(steps) == STREAMED
    for request, match in (
        (Request(thinking_token_budget=5), "thinking_token_budget is set"),
        (Request(logprobs=30), "greater than max allowed: 20"),
    ):
        with pytest.raises(VLLMValidationError, match=match):
            await serve(steps, request=request)
    assert steps.prompts == [PROMPT], "only that of the good one"


@pytest.mark.parametrize("request_", [Request(), WHOLE])
async def test_what_the_engines_refuse_is_refused(request_):
    steps = Play({A: refusal()})
    (answer,) = await serve(steps, request=request_)
    assert answer.error.code == 400
    assert steps.asked == []


@pytest.mark.parametrize("request_", [Request(), WHOLE], ids=str)
@pytest.mark.parametrize("is_here", [False, True])
async def test_what_stands_before_the_engine_can_answer_a_request_itself(request_, is_here):
    steps = Play({A: ANSWER})
    served = orchestrator(steps)

    async def refused(prompt, params, request_id, **options):
        assert params.extra_args[TENANT_XARG] == "acme"
        raise served.refuse(params, error_response(429, "grammars", "too many"))
        yield

    steps._engine_client.generate = refused
    call, asked = called(request_), context(tenant="acme")
    if is_here:
        async with admitted(LocalPrefills(1), asked, 1, 60.0) as here:
            (piece,) = await read(served.run_here(call, asked, here, "several_prompts"))
    else:
        (piece,) = await read(served.run(call, asked))
    assert (piece.error.code, piece.error.type) == (429, "grammars")
    assert steps.prompts == []


@pytest.mark.parametrize(
    ("ends", "why"),
    [(REJECTS, "no token that"), ((TAKES_LONG, [THIRD]), "took too long; write what it must")],
)
@pytest.mark.parametrize("first", [[], [[FIRST]]], ids=str)
@pytest.mark.parametrize("way", ["prefilled elsewhere", "computed here", 1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_its_own_grammar_ends_is_the_requests_fault_and_not_placed_again(
    stream, way, first, ends, why
):
    """As where `allowed_token_ids` has nothing that the grammar allows: no other replica has either."""
    plays = [*first, ends]
    steps, local, n = Play({A: plays}), LocalPrefills(2), way if isinstance(way, int) else 1
    steps.at_home = plays
    asked = Request(stream=stream, n=n, json_object=True)
    if way == "prefilled elsewhere":
        *pieces, refused = await serve(steps, request=asked)
    elif way == "computed here":
        place = {"prefill_replica": None, "local_prefill": "cheaper_on_decode"}
        *pieces, refused = await serve(steps, request=asked, local=local, **place)
    else:
        served = orchestrator(steps, local=local)
        async with admitted(local, context(), n, 60.0) as here:
            answer = served.run_here(called(asked), context(), here, "several_sequences")
            *pieces, refused = await read(answer)
    assert set(pieces) == ({STREAMED[0]} if stream and first else set())
    error = refused.error
    assert (error.code, error.type, error.param) == (400, ENDED_BY_GRAMMAR, "structured_outputs")
    assert why in error.message
    assert steps.asked == []
