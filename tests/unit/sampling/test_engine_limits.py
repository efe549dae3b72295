"""The numbers are those for which vLLM's second model runner has room, and nobody can configure more."""

import pytest
from pydantic import ValidationError
from vllm import envs
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from vllm.v1.worker.gpu.sample import logit_bias

from deployments.config.limits import LimitsConfig
from sampling import engine_limits

MODELS_OWN_ENDS = 16
"""More than any model has."""


def test_the_limits_are_vllms_own():
    assert logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS == engine_limits.MOST_TOKEN_IDS
    assert logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS == engine_limits.MOST_TOKEN_IDS
    assert logit_bias.MAX_NUM_STOP_TOKEN_IDS == engine_limits.MOST_STOP_TOKENS + MODELS_OWN_ENDS
    assert MAX_LOGPROB_TOKEN_IDS == engine_limits.MOST_LOGPROB_TOKEN_IDS
    assert envs.VLLM_MAX_NUM_BAD_WORDS == 2 * engine_limits.MOST_BAD_WORDS


def test_a_model_that_ends_in_several_ways_has_room_for_them():
    params = SamplingParams(stop_token_ids=list(range(engine_limits.MOST_STOP_TOKENS)), min_tokens=1)
    params.update_from_generation_config({"eos_token_id": list(range(1000, 1015))}, 1015)
    assert len(params.all_stop_token_ids) == logit_bias.MAX_NUM_STOP_TOKEN_IDS


@pytest.mark.parametrize(
    ("key", "most"), [("max_token_ids", 1024), ("max_stop_tokens", 112), ("max_bad_words", 64)]
)
def test_nobody_can_allow_more(key, most):
    LimitsConfig(**{key: most})
    with pytest.raises(ValidationError, match=f"less than or equal to {most}"):
        LimitsConfig(**{key: most + 1})
