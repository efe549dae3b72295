"""How each tier's engine runs its steps: how large, compiled or not, composed ahead or not."""

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from deployments.config.settings import parse


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "step_tokens"),
    [
        ({}, 2048),
        ({"max_model_len": 64}, 64),
        ({"max_model_len": 64, "prefill": {"engine_kwargs": {"max_num_seqs": 128}}}, 128),
        ({"prefill": {"engine_kwargs": {"enable_chunked_prefill": False}}}, None),
        ({"prefill": {"engine_kwargs": {"max_num_batched_tokens": 512}}}, 512),
        ({"model": "org/model"}, 8192),
        ({"model": "org/model", "max_model_len": 4096}, 4096),
    ],
    ids=str,
)
def test_a_step_of_prefill_takes_as_much_as_a_chunk_whether_or_not_the_length_is_known(
    options, tiny, values, step_tokens
):
    config, _ = options({"model": tiny, **values})["prefill"]
    given = config.engine_kwargs
    assert given.get("max_num_batched_tokens") == step_tokens
    if "model" not in values:
        sizes = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill")
        AsyncEngineArgs(tiny, **{key: given[key] for key in sizes if key in given}).create_engine_config()


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"max_model_len": 1024}], ids=str)
def test_chunks_of_decode_are_no_longer_than_the_model(options, tiny, values):
    config, _ = options({"model": tiny, "degraded": {"chunk_tokens": 4096}, **values})["decode"]
    longest = values.get("max_model_len", 2048)
    assert config.engine_kwargs["long_prefill_token_threshold"] == longest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "is_ahead"),
    [
        ({}, True),
        ({"accelerator": "cpu"}, False),
        ({"pressure": {"enabled": True}}, False),
        ({"decode": {"engine_kwargs": {"speculative_config": {"method": "ngram"}}}}, False),
        ({"decode": {"engine_kwargs": {"async_scheduling": False}}}, False),
    ],
    ids=str,
)
def test_decode_composes_steps_ahead_on_gpus_unless_something_forbids_it(options, tiny, values, is_ahead):
    from decode_node.carrying import ASYNC_SCHEDULER

    found = options({"model": tiny, "accelerator": "cuda", **values})
    decode = found["decode"][0].engine_kwargs
    assert decode["async_scheduling"] is is_ahead
    assert (decode["scheduler_cls"] == ASYNC_SCHEDULER) is is_ahead
    assert found["prefill"][0].engine_kwargs["async_scheduling"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "is_eager", "is_ahead"),
    [
        ({}, True, False),
        ({"preemption": {"compiled": True}}, False, False),
        ({"preemption": {"mode": "off"}}, False, None),
        ({"preemption": {"mode": "off"}, "prefill": {"engine_kwargs": {"enforce_eager": True}}}, True, None),
        ({"preemption": {"mode": "off"}, "accelerator": "cpu"}, True, None),
    ],
    ids=str,
)
def test_where_prefill_is_never_stopped_it_runs_as_vllm_does(options, tiny, values, is_eager, is_ahead):
    config, _ = options({"model": tiny, "accelerator": "cuda", **values})["prefill"]
    assert config.engine_kwargs["enforce_eager"] is is_eager
    assert config.engine_kwargs["async_scheduling"] is is_ahead
    assert "VLLM_USE_V2_MODEL_RUNNER" not in config.runtime_env["env_vars"], "vLLM chooses it"


@pytest.mark.slow
def test_prefill_that_turns_out_to_be_refused_knows_how_vllm_would_run(tiny):
    from deployments.engines.arguments import stock_prefill

    for accelerator, is_eager in (("cuda", False), ("cpu", True)):
        config = parse({"model": tiny, "accelerator": accelerator})
        assert stock_prefill(config) == {"async_scheduling": None, "enforce_eager": is_eager}
