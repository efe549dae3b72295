"""A prefill that was stopped ends exactly as one that was not: tokens, log-probabilities, KV bit for bit."""

import random

import pytest
import torch
from engines import COMPILED, engine, random_prompt
from vllm.compilation.counter import compilation_counter
from vllm.v1.worker import cpu_model_runner as first_runner
from vllm.v1.worker.cpu import model_runner as second_runner

from deployments.models.store import ModelStore
from prefill_node.board.events import Resumed
from prefill_node.engine_setup import EngineSetup

PROMPT = random_prompt(700, seed=1)
WHOLE = 2 * 128 * 4
"""Bytes of a checkpoint for each token: hidden states and residual, 128 wide, in float32."""

needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM has these kernels for CPUs with AVX-512 only"
)


def undisturbed(running, prompt=PROMPT):
    running.forget()
    answer = running.prefill("undisturbed", prompt)
    running.forget()
    return answer


def undisturbed_one(running, name, prompt):
    answer = running.prefill(name, prompt)
    running.forget()
    return answer


def stopped(running, boundaries, prompt=PROMPT):
    running.stop_at(*boundaries)
    answer = running.prefill("stopped", prompt)
    assert running.rpc("stops_left")[0] == 0, "not every stop took place"
    running.check_at_rest()
    running.forget()
    return answer


def assert_exact_at_every_boundary(running):
    assert_exact_at_each(running, range(running.boundaries))


def assert_exact_at_each(running, boundaries):
    expected = undisturbed(running)
    for boundary in boundaries:
        assert stopped(running, [boundary]) == expected, f"differs after a stop at boundary {boundary}"


ENGINES = [
    "llama_operator",
    "llama_operator_tp2",
    "llama_sublayer",
    "llama_chunked",
    "llama_recompute",
    "llama_bfloat16",
    "llama_compiled",
    "llama_compiled_tp2",
    "llama_compiled_layer",
]
"""Chunked and recompute stop between layers; the last one takes chunks too."""


@pytest.mark.parametrize("shared_engine", ENGINES, indirect=True)
def test_stopped_at_every_boundary_in_turn(shared_engine):
    running = shared_engine
    assert_exact_at_every_boundary(running)


@pytest.mark.parametrize("shared_engine", ENGINES, indirect=True)
def test_stopped_at_random_boundaries_many_times(shared_engine):
    running = shared_engine
    expected = undisturbed(running)
    rng = random.Random(7)
    for _ in range(5):
        boundaries = sorted(rng.choices(range(running.boundaries), k=rng.randint(2, 6)))
        assert stopped(running, boundaries) == expected, f"differs after stops at {boundaries}"


@pytest.mark.parametrize("shared_engine", ["llama_operator", "llama_operator_tp2"], indirect=True)
def test_several_suspended_at_operators_and_stopped_there_again(shared_engine):
    running = shared_engine
    prompts = {f"prompt-{number}": random_prompt(300 + 100 * number, seed=number) for number in range(3)}
    expected = {job: undisturbed_one(running, job, prompt) for job, prompt in prompts.items()}
    for shift in range(5):
        for number, (job, prompt) in enumerate(prompts.items()):
            running.add(job, prompt)
            running.stop_at(5 + 5 * number + shift)
            running.order_stop(f"prompt-{number + 1}")
            assert running.step() == []
        running.stop_at(16, 17, 17, 19, 19)
        running.finish()
        assert running.rpc("stops_left")[0] == 0
        assert running.answers == expected
        running.check_at_rest()
        running.forget()


@pytest.mark.parametrize("shared_engine", ["llama_operator", "llama_compiled"], indirect=True)
def test_stopped_behind_a_prefix_from_the_cache(shared_engine):
    """The rest of the prompt attends to blocks of another request; those of a stopped one serve as well."""
    running = shared_engine
    cached = len(PROMPT) // 128 * 128

    def behind_a_prefix(*boundaries):
        running.forget()
        running.prefill("prefix", PROMPT[:300])
        running.stop_at(*boundaries)
        answer = running.prefill("whole", PROMPT)
        assert running.cached_tokens["whole"] == 256
        assert running.rpc("stops_left")[0] == 0
        again = running.prefill("again", PROMPT)
        assert running.cached_tokens["again"] == cached
        running.check_at_rest()
        return answer, again

    expected = behind_a_prefix()
    assert expected[0].tokens == expected[1].tokens
    for boundary in range(running.boundaries):
        assert behind_a_prefix(boundary) == expected, f"differs after a stop at boundary {boundary}"
    running.forget()


@pytest.mark.parametrize(
    ("shared_engine", "first", "last"),
    [
        ("llama_operator", 0, WHOLE),
        # Queries, keys, values, room for the result, residual.
        ("llama_compiled", 2 * WHOLE - 3 * 512, WHOLE),
    ],
    indirect=["shared_engine"],
)
def test_what_is_kept_within_a_layer_and_between_compiled_pieces(shared_engine, first, last):
    """Only what is ahead of the layer in which it stopped is known to be empty."""
    running = shared_engine
    running.forget()
    told, four_blocks = running.rpc("kept_bytes")[0], PROMPT[:512]
    assert (told[0], told[1], told[-1]) == (0, first, last)
    for boundary in range(1, running.boundaries):
        kept = running.kept_bytes(f"at-{boundary}", four_blocks, boundary)
        assert kept == pytest.approx(told[boundary] * len(four_blocks)), f"at boundary {boundary}"
    running.finish()
    running.check_at_rest()
    running.forget()


@pytest.mark.parametrize("shared_engine", ["llama_recompute"], indirect=True)
def test_without_a_checkpoint_a_stopped_step_counts_as_not_begun(shared_engine):
    running = shared_engine
    running.forget()
    running.add("stopped", PROMPT[:64])
    running.stop_at(2)
    assert running.step() == []
    (suspended,) = running.scheduler._suspensions.steps
    assert (suspended.done, suspended.checkpoint_bytes) == (0.0, 0)
    running.finish()
    assert [notice.boundary for notice in running.notices() if isinstance(notice, Resumed)] == [0]
    running.check_at_rest()
    running.forget()


OPERATORS = {"qwen2": 7, "qwen3": 7, "qwen3_moe": 5, "mistral": 7, "mixtral": 5}
"""Boundaries in each of four layers."""


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        *((name, (0, 3)) for name in ("qwen2", "qwen3", "qwen3_moe")),
        *(pytest.param(name, range(4), marks=pytest.mark.long) for name in OPERATORS),
    ],
)
def test_other_architectures_before_each_operator(architecture, layers, models):
    per_layer = OPERATORS[architecture]
    with engine(models(architecture), setup=EngineSetup(mode="resume", granularity="operator")) as running:
        ((done, _, _, granularity, why_not_finer),) = running.rpc("preemption_support")
        assert (len(done), granularity, why_not_finer) == (4 * per_layer, "operator", "")
        for of_tokens, of_attention in done[::per_layer]:
            assert of_tokens == pytest.approx(of_attention)
        assert [of_tokens for of_tokens, _ in done[::per_layer]] == pytest.approx([0, 0.25, 0.5, 0.75])
        of_layers = [layer * per_layer + number for layer in layers for number in range(per_layer)]
        assert_exact_at_each(running, of_layers)


@pytest.mark.parametrize("shared_engine", ["llama_compiled", "llama_compiled_tp2"], indirect=True)
def test_several_suspended_between_compiled_pieces(shared_engine):
    running = shared_engine
    prompts = {f"prompt-{number}": random_prompt(300 + 100 * number, seed=number) for number in range(3)}
    expected = {job: undisturbed_one(running, job, prompt) for job, prompt in prompts.items()}
    for number, (job, prompt) in enumerate(prompts.items()):
        running.add(job, prompt)
        running.stop_at(2 + 2 * number)
        running.order_stop(f"prompt-{number + 1}")
        assert running.step() == []
    running.stop_at(7, 7, 8)
    running.finish()
    assert running.rpc("stops_left")[0] == 0
    assert running.answers == expected
    running.check_at_rest()
    running.forget()


OTHERS = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma3_text": {},
    "mistral": {},
    "mixtral": {},
    "gpt_oss": {"dtype": "bfloat16"},  # vLLM computes its router in no other on a CPU
    "awq": {"dtype": "float16"},
    # On CPUs with AMX vLLM chooses kernels for this attention that take no float32.
    "deepseek_v2": {"attention_backend": "CPU_MLA"},
}
"""Architectures of four layers with one attention each, and what their engines are started with."""


@pytest.mark.long
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=needs_avx512) if name == "awq" else name for name in OTHERS],
)
def test_other_architectures_compiled(architecture, models):
    with engine(models(architecture), **COMPILED, **OTHERS[architecture]) as running:
        assert running.boundaries == 2 * 4 + 1
        assert_exact_at_every_boundary(running)


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "boundaries", "options"),
    [
        ("gemma3_text", 4, {}),
        # The window leaves blocks behind between chunks.
        ("gemma3_text", 4, {"block_size": 32, "max_num_batched_tokens": 256}),
        ("gpt_oss", 4, OTHERS["gpt_oss"]),
        ("deepseek_v2", 4, OTHERS["deepseek_v2"]),
        pytest.param("awq", 28, OTHERS["awq"], marks=needs_avx512),
        ("paligemma", 4, {"language_model_only": True}),
    ],
)
def test_other_architectures_eager(architecture, boundaries, options, models):
    """Those whose code nobody has read for it stop between layers."""
    setup = EngineSetup(mode="resume", granularity="operator")
    with engine(models(architecture), setup=setup, **options) as running:
        assert running.boundaries == boundaries
        assert_exact_at_every_boundary(running)


@pytest.mark.long
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM has these kernels for AMX only")
@pytest.mark.parametrize("options", [COMPILED, {"setup": EngineSetup(mode="resume", granularity="operator")}])
def test_latent_attention_in_matrix_units(options, models):
    with engine(models("deepseek_v2"), dtype="bfloat16", **options) as running:
        assert_exact_at_every_boundary(running)


@pytest.mark.long
@needs_avx512
@pytest.mark.parametrize("options", [COMPILED, {"setup": EngineSetup(mode="resume", granularity="operator")}])
def test_keys_and_values_of_eight_bits(options, models):
    with engine(models("llama"), dtype="bfloat16", kv_cache_dtype="fp8", **options) as running:
        assert_exact_at_every_boundary(running)


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "options", "why"),
    [
        ("falcon_h1", COMPILED | {"dtype": "bfloat16"}, "keeps a recurrent state"),
        ("falcon_h1", {"dtype": "bfloat16"}, "keeps a recurrent state"),
        ("paligemma", COMPILED | {"language_model_only": True}, "compiled 0 passes"),
    ],
)
def test_what_is_served_without_preemption(architecture, options, why, models):
    with engine(models(architecture), **options) as running:
        ((done, _, _, _, refusal),) = running.rpc("preemption_support")
        assert done == ()
        assert why in refusal
        assert undisturbed(running).tokens


@pytest.mark.long
def test_pieces_that_inductor_has_compiled(models, monkeypatch, tmp_path):
    """Once compiled in this process, and once from what vLLM has stored of that."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    for loaded in (0, 1):
        found = compilation_counter.expect(num_aot_artifacts_loaded=loaded)
        with found, engine(models("llama"), **COMPILED) as running:
            expected = undisturbed(running)
            assert stopped(running, [1]) == expected
            for boundary in range(running.boundaries):
                assert stopped(running, [boundary]) == expected, f"differs after a stop at {boundary}"
            assert stopped(running, [0, 3, 3, 4, 8]) == expected


@pytest.mark.long
def test_an_engine_that_could_not_start_leaves_the_next_one_alone(models, monkeypatch):
    def fail(runner):
        raise MemoryError("of warming up")

    starts = engine(models("llama"), **COMPILED)
    with monkeypatch.context() as patched:
        for runner in (first_runner, second_runner):
            patched.setattr(runner.CPUModelRunner, "warming_up_model", fail)
        with pytest.raises(MemoryError, match="of warming up"):
            starts.__enter__()
    with engine(models("llama"), **COMPILED) as running:
        expected = undisturbed(running)
        assert stopped(running, [3]) == expected


def test_a_model_that_computes_between_its_layers_is_preempted_when_compiled(models):
    with engine(models("solar"), **COMPILED) as running:
        ((done, _, _, granularity, _),) = running.rpc("preemption_support")
        assert (len(done), granularity) == (2 * 4 + 1, "sublayer")
        assert_exact_at_every_boundary(running)


def test_a_model_that_computes_between_its_layers_is_not_preempted(models):
    """It would go on with other values: a skip connection starts before the checkpoint's layer."""
    with engine(models("solar")) as running:
        ((done, _, _, _, refusal),) = running.rpc("preemption_support")
        assert done == ()
        assert "SolarForCausalLM: a pass of it that is stopped and resumed ends with other values" in refusal
        running.stop_at(2)
        assert running.prefill("whole", PROMPT).tokens
        assert running.rpc("stops_left")[0] == 1, "nothing stops"


@pytest.mark.embedded
def test_the_embedded_model():
    """Thirty layers, three KV heads, real weights."""
    source = ModelStore().resolve(None).source
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 16}
    with engine(source, **sizes) as running:
        assert running.boundaries == 30
        prompt = random_prompt(140, seed=2, vocabulary=40_000)
        expected = undisturbed(running, prompt)
        for boundaries in ([0], [29], [3, 3, 17, 28], [5, 11, 12, 20, 29]):
            assert stopped(running, boundaries, prompt) == expected, f"differs after stops at {boundaries}"
