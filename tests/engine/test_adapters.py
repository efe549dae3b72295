"""A prefill that a LoRA adapter answers stops and goes on exactly, whoever else's the pass was meanwhile."""

import pytest
from engines import random_prompt

from benchmarks.harness.tiny_models import build_tiny_adapter

PROMPT = random_prompt(400, seed=1)
BOUNDARIES = [0, 3, 9, 17, 24]
"""At each operator of a layer, in different layers."""


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory):
    """Two directories, and None for the model itself."""
    directory = tmp_path_factory.mktemp("adapters")
    made = [build_tiny_adapter(directory / name, models("llama"), seed) for seed, name in enumerate("ab", 1)]
    return [*made, None]


def alone(running, prompt, adapter):
    running.forget()
    answer = running.prefill("alone", prompt, adapter=adapter)
    running.forget()
    return answer


@pytest.mark.parametrize("shared_engine", ["llama_lora", "llama_lora_tp2"], indirect=True)
def test_a_prefill_is_stopped_for_one_of_another_adapter(shared_engine, adapters):
    running = shared_engine
    assert running.boundaries >= 7 * 4
    urgent = random_prompt(60, seed=2)
    expected = {adapter: alone(running, PROMPT, adapter) for adapter in adapters}
    expected_urgent = {adapter: alone(running, urgent, adapter) for adapter in adapters}
    assert len({answer.kv for answer in expected.values()}) == len(adapters), "an adapter changes nothing"
    for number, adapter in enumerate(adapters):
        other = adapters[number - 1]
        for boundary in BOUNDARIES:
            running.add("stopped", PROMPT, adapter=adapter)
            running.stop_at(boundary)
            running.order_stop("urgent")
            assert running.step() == []
            running.add("urgent", urgent, deadline_s=0.5, adapter=other)
            running.finish()
            assert running.answers["urgent"] == expected_urgent[other]
            assert running.answers["stopped"] == expected[adapter], f"stopped at {boundary} by {other}"
            running.check_at_rest()
            running.forget()


@pytest.mark.parametrize("shared_engine", ["llama_lora"], indirect=True)
def test_prefixes_of_two_adapters_are_not_shared(shared_engine, adapters):
    running = shared_engine
    running.forget()
    for adapter in adapters:
        running.prefill(f"first of {adapter}", PROMPT, adapter=adapter)
        assert running.cached_tokens[f"first of {adapter}"] == 0
    running.prefill("again", PROMPT, adapter=adapters[0])
    assert running.cached_tokens["again"] > 0
    running.forget()
