"""Whose first token is carried, and whose stream goes on elsewhere."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from decode_node.carrying import ASYNC_SCHEDULER, WORKERS, why_bound, why_resampled


def engine(**about):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=about.get("scheduler", ASYNC_SCHEDULER)),
        parallel_config=SimpleNamespace(worker_cls=about.get("worker", WORKERS["cuda"])),
        speculative_config=about.get("speculates"),
        model_config=SimpleNamespace(enable_return_routed_experts=about.get("experts", False)),
    )


GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="a")}


@pytest.mark.parametrize(
    ("config", "asked", "reason"),
    [
        ({}, {}, None),
        ({"scheduler": "another"}, {}, "engine"),
        ({"worker": "another"}, GRAMMAR, "engine"),
        ({"speculates": "yes"}, {}, "engine"),
        ({"experts": True}, {}, "engine"),
        ({}, GRAMMAR, "grammar"),
        ({}, {"logprob_token_ids": [1]}, "logprob_tokens"),
        ({}, {"thinking_token_budget": 5}, "thinking_budget"),
    ],
)
def test_what_is_not_carried_has_one_reason_for_both(config, asked, reason):
    config, params = engine(**config), SamplingParams(**asked)
    assert (why_bound(config, params), why_resampled(config, params)) == (reason, reason)
