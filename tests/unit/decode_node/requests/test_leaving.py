"""Who may leave an engine, and what is carried of it."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from decode_node.carrying import PRESSURE_SCHEDULER, WORKERS
from decode_node.requests.leaving import LEFT, Generated, may_leave
from sampling.carried import Carried

DELTA, WHOLE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def config(stream_interval=1, *, second_runner=True):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=PRESSURE_SCHEDULER, stream_interval=stream_interval),
        parallel_config=SimpleNamespace(worker_cls=WORKERS["cpu"]),
        model_config=SimpleNamespace(enable_return_routed_experts=False),
        speculative_config=None,
        use_v2_model_runner=second_runner,
    )


def test_whose_state_can_be_carried_may_leave():
    assert may_leave(config(), SamplingParams(output_kind=DELTA))
    assert may_leave(config(), SamplingParams(output_kind=WHOLE, seed=1, logprobs=2, presence_penalty=1.0))
    assert not may_leave(config(stream_interval=2), SamplingParams(output_kind=DELTA))
    assert not may_leave(config(second_runner=False), SamplingParams(output_kind=DELTA, seed=1))


@pytest.mark.parametrize(
    "given",
    [
        {"stop": ["end"]},
        {"n": 2},
        {"prompt_logprobs": 1},
        {"output_kind": RequestOutputKind.CUMULATIVE},
        {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])},
    ],
    ids=str,
)
def test_others_stay(given):
    assert not may_leave(config(), SamplingParams(**{"output_kind": DELTA, **given}))


def output(tokens, *, left=False, logprobs=None):
    reason = "error" if left else None
    completion = SimpleNamespace(
        token_ids=tokens, finish_reason=reason, stop_reason=LEFT if left else None, logprobs=logprobs
    )
    return SimpleNamespace(outputs=[completion], finished=left)


def test_of_a_stream_all_tokens_are_carried_and_its_client_has_them():
    generated = Generated(Carried([1]), SamplingParams(output_kind=DELTA, logprobs=1))
    assert generated.take(output([2])) == (True, None)
    last = output([3, 4], left=True)
    brings, left = generated.take(last)
    assert brings, "tokens that nobody had taken before"
    assert not last.finished
    assert last.outputs[0].finish_reason is None
    assert left.carried == Carried([1, 2, 3, 4], is_sent=True)
    brings, left = generated.take(output([], left=True))
    assert not brings


def test_a_clients_own_stop_string_is_no_word_of_the_engines():
    said = output([5])
    said.outputs[0].stop_reason, said.outputs[0].finish_reason, said.finished = LEFT, "stop", True
    assert Generated(None, SamplingParams(output_kind=DELTA)).take(said) == (True, None)


def test_of_a_whole_answer_log_probabilities_are_carried_as_they_were_sampled():
    params = SamplingParams(output_kind=WHOLE, logprobs=1)
    positions = [{7: Logprob(-0.1, 1)}, {9: Logprob(-2.0, 3), 8: Logprob(-0.2, 1)}]
    brings, left = Generated(None, params).take(output([7, 9], left=True, logprobs=positions))
    assert not brings
    assert left.carried.token_ids == [7, 9]
    first, second = left.carried.logprobs
    assert (first.token_ids, first.logprobs, first.rank) == ([7, 7], [-0.1, -0.1], 1)
    assert (second.token_ids, second.logprobs, second.rank) == ([9, 8], [-2.0, -0.2], 3)
