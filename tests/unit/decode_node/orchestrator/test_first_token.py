"""Who samples the first token, when it is due, and when it counts as sampled again."""

import time

import pytest
from played_replicas import (
    ANSWER,
    FAILED,
    FIRST,
    PROMPT,
    RESAMPLED,
    STREAMED,
    A,
    B,
    C,
    Counts,
    Play,
    Request,
    called,
    context,
    orchestrator,
    read,
    serve,
    tokens_of,
)
from real_schedulers import Clock
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from decode_node.rendering import LocalReason
from decode_node.requests.local_prefills import LocalPrefills
from slo.replacement import FailureCause, Replaced
from slo.request import FIRST_DUE_XARG


async def test_with_the_same_model_runner_on_both_tiers_a_seed_carries():
    steps, counts = Play({A: ANSWER}, second_runner=True), Counts()
    assert await serve(steps, counts, request=RESAMPLED) == STREAMED
    assert not counts


async def test_a_seed_that_prefill_draws_otherwise_with_is_counted_once_whatever_fails():
    steps, counts = Play({A: [FAILED], B: ANSWER}, [Replaced(B, 0.1)]), Counts()
    assert await serve(steps, counts, request=RESAMPLED) == STREAMED
    assert counts["seed",] == 1


class Constrained(Play):
    """Asks for answers that a grammar constrains."""

    async def completions(self, request, info):
        params = SamplingParams(
            max_tokens=3,
            extra_args=request.vllm_xargs,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=StructuredOutputsParams(json_object=True),
        )
        async for one in self._engine_client.generate({"prompt_token_ids": PROMPT}, params, "request"):
            for token in tokens_of(one):
                yield f"data: {token}"
        yield "data: [DONE]"


async def test_a_first_token_counts_as_sampled_again_once_prefill_has_sampled_it():
    steps, counts = Constrained({A: FailureCause.REPLICA_DIED, B: [FAILED], C: ANSWER}), Counts()
    steps.places = [Replaced(B, 0.1), Replaced(C, 0.1)]
    assert await serve(steps, counts) == STREAMED
    assert counts["grammar",] == 1


async def test_a_first_token_that_only_decode_samples_does_not_count_as_sampled_again():
    steps, counts = Constrained({}), Counts()
    steps.at_home = ANSWER
    why = LocalReason.CHEAPER_ON_DECODE.value
    assert await serve(steps, counts, local=LocalPrefills(1), local_prefill=why) == STREAMED
    assert counts == {(why,): 1}


async def test_the_engines_scheduler_learns_when_the_first_token_is_due_that_it_samples():
    steps, before_s = Play({A: ANSWER}), time.monotonic()
    for request, budget_s in ((RESAMPLED, 2.0), (RESAMPLED, None), (Request(), 2.0)):
        await serve(steps, request=request, ttft_budget_s=budget_s)
    sampled, without, carried = steps.given
    assert before_s + 2.0 <= sampled[FIRST_DUE_XARG] <= time.monotonic() + 2.0
    assert FIRST_DUE_XARG not in without
    assert FIRST_DUE_XARG not in carried, "its client has it already"


async def test_what_a_request_waits_for_before_its_prefill_is_taken_off_its_budget(monkeypatch):
    """As for the check of what its answer must conform to, which stands before the engine."""
    steps = Play({A: FailureCause.REPLICA_DIED, B: ANSWER}, [Replaced(B, 0.1)])
    served, clock = orchestrator(steps), Clock()
    straight = steps._engine_client.generate
    monkeypatch.setattr("decode_node.orchestrator.time", clock)

    async def checked(prompt, params, request_id):
        clock.now_s += 0.5
        async for one in straight(prompt, params, request_id):
            yield one

    steps._engine_client.generate = checked
    given = context(ttft_budget_s=2.0, explicit_e2e_s=8.0)
    assert await read(served.run(called(), given)) == STREAMED
    (asked,) = steps.asked
    assert [one.ttft_budget_s for one in (steps.contexts[0], asked)] == [1.5, 1.5]
    assert [one.explicit_e2e_s for one in (steps.contexts[0], asked)] == [7.5, 7.5]
    assert steps.contexts[1].ttft_budget_s == pytest.approx(1.5, abs=0.5), "without how long the router took"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_first_token_that_ends_the_answer_needs_no_decode(stream):
    steps = Play({A: []}, ended=True)
    answer = await serve(steps, request=Request(stream=stream))
    assert answer == (["data: 1", "data: [DONE]"] if stream else [[FIRST]])
    assert steps.released == []
