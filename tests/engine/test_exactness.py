"""A prefill that was stopped ends exactly as one that was not: tokens, log-probabilities, KV bit for bit."""

import random

import pytest
from engines import engine, random_prompt

from deployments.model_store import ModelStore
from prefill_node.engine_setup import EngineSetup

PROMPT = random_prompt(700, seed=1)


def undisturbed(running, prompt=PROMPT):
    running.forget()
    answer = running.prefill("undisturbed", prompt)
    running.forget()
    return answer


def stopped(running, boundaries, prompt=PROMPT):
    running.stop_at(*boundaries)
    answer = running.prefill("stopped", prompt)
    assert running.rpc("stops_left")[0] == 0, "not every stop took place"
    running.check_at_rest()
    running.forget()
    return answer


ENGINES = ["llama", "llama_tp2", "llama_sublayer", "llama_chunked", "llama_recompute"]


@pytest.mark.parametrize("name", ENGINES)
def test_stopped_at_every_boundary_in_turn(name, request):
    running = request.getfixturevalue(name)
    expected = undisturbed(running)
    for boundary in range(running.boundaries):
        assert stopped(running, [boundary]) == expected, f"differs after a stop at boundary {boundary}"


@pytest.mark.parametrize("name", ENGINES)
def test_stopped_at_random_boundaries_many_times(name, request):
    running = request.getfixturevalue(name)
    expected = undisturbed(running)
    rng = random.Random(7)
    for _ in range(5):
        boundaries = sorted(rng.choices(range(running.boundaries), k=rng.randint(2, 6)))
        assert stopped(running, boundaries) == expected, f"differs after stops at {boundaries}"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe"])
def test_other_architectures_before_each_layer_and_each_mlp(architecture, models):
    with engine(models(architecture), setup=EngineSetup(mode="resume", granularity="sublayer")) as running:
        assert running.rpc("preemption_support") == [(8, "sublayer", "")]
        expected = undisturbed(running)
        for boundary in range(running.boundaries):
            assert stopped(running, [boundary]) == expected, f"differs after a stop at boundary {boundary}"


@pytest.mark.embedded
def test_the_embedded_model():
    """Thirty layers, three KV heads, real weights."""
    source = ModelStore().resolve(None).source
    with engine(source, max_model_len=1024, max_num_batched_tokens=1024) as running:
        assert running.boundaries == 30
        prompt = random_prompt(300, seed=2, vocabulary=40_000)
        expected = undisturbed(running, prompt)
        for boundaries in ([0], [1], [14], [29], [3, 3, 17, 28], [5, 11, 12, 20, 29]):
            assert stopped(running, boundaries, prompt) == expected, f"differs after stops at {boundaries}"
