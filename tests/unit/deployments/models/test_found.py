"""How long a model's prompts may be, and how answers are sampled, is as in its engines."""

import contextlib
import json
import math
import shutil
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from benchmarks.harness.tiny_models import build_tiny_llama
from deployments.config import ConfigError
from deployments.config.settings import parse
from deployments.models.found import FoundModel

pytestmark = pytest.mark.slow

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONG = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
BY_LAYER = {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", context=2048)


@pytest.fixture
def model(tiny, tmp_path):
    """Writes a model, without its weights, whose config.json says something else."""

    def written(changes):
        target = tmp_path / "model"
        shutil.copytree(tiny, target, ignore=shutil.ignore_patterns("*.safetensors"))
        values = json.loads((tiny / "config.json").read_text())
        values.pop("rope_parameters", None)
        values.pop("rope_scaling", None)
        (target / "config.json").write_text(json.dumps(values | changes))
        return str(target)

    return written


@pytest.mark.parametrize(
    ("changes", "by_default", "most"),
    [
        ({}, 2048, 2048),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048, 2048),
        ({"rope_scaling": YARN}, 8192, 8192),
        ({"rope_parameters": YARN | {"rope_theta": 1e4}}, 8192, 8192),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1024}}, 4096, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 8192, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 4096, 4096),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}, 5120, 5120),
        ({"rope_scaling": LLAMA3}, 2048, 2048),
        (
            {
                "model_type": "phi3",
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": LONG,
                "original_max_position_embeddings": 512,
            },
            512,
            2048,
        ),
        (
            {
                "model_type": "gemma3_text",
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": BY_LAYER,
                },
            },
            2048,
            2048,
        ),
        (
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "rope_scaling": YARN,
                "max_position_embeddings": 8192,
            },
            8192,
            8192,
        ),
    ],
    ids=str,
)
def test_the_longest_is_what_vllm_takes(model, changes, by_default, most):
    directory = model(changes)

    def vllm_takes(length=None):
        return AsyncEngineArgs(model=directory, max_model_len=length).create_model_config().max_model_len

    assert FoundModel.of(parse({"model": directory})).longest == by_default
    assert FoundModel.of(parse({"model": directory, "max_model_len": most})).longest == most
    with pytest.raises(ConfigError, match=rf"max_model_len: {most + 1} is more than the model's {most}"):
        FoundModel.of(parse({"model": directory, "max_model_len": most + 1}))
    assert vllm_takes() == by_default
    assert vllm_takes(most) == most
    with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
        vllm_takes(most + 1)


@pytest.mark.parametrize(
    ("of_model", "given", "expected"),
    [
        (None, {}, {}),
        ({"eos_token_id": 2}, {}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6}, {"generation_config": "vllm"}, {}),
        (
            {"temperature": 0.6},
            {"override_generation_config": {"top_p": 0.5}},
            {"temperature": 0.6, "top_p": 0.5},
        ),
        (
            {"temperature": 0.6, "top_p": 0.9},
            {"override_generation_config": {"temperature": None}},
            {"top_p": 0.9},
        ),
        (None, {"generation_config": "elsewhere"}, {"temperature": 0.3}),
        ({"temperature": 0.6}, {"hf_config_path": "elsewhere"}, {"temperature": 0.3}),
    ],
    ids=str,
)
def test_answers_are_sampled_as_by_vllm(model, monkeypatch, tmp_path, of_model, given, expected):
    directory = Path(model({}))
    if of_model is not None:
        (directory / "generation_config.json").write_text(json.dumps(of_model))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(directory, "elsewhere")
    (tmp_path / "elsewhere/generation_config.json").write_text(json.dumps({"temperature": 0.3}))
    of_vllm = AsyncEngineArgs(model=str(directory), **given).create_model_config().get_diff_sampling_param()
    assert {name: value for name, value in of_vllm.items() if name in {"temperature", "top_p"}} == expected
    config = parse({"model": str(directory), "decode": {"engine_kwargs": given}})
    assert FoundModel.of(config).sampled_with == expected


@pytest.mark.parametrize(
    ("given", "limits", "unnamed", "most"),
    [
        ({}, {}, 50, None),
        ({"generation_config": "vllm"}, {}, None, None),
        ({"generation_config": "elsewhere"}, {}, 30, 30),
        ({"override_generation_config": {"max_new_tokens": 9}}, {}, 9, 9),
        ({"override_generation_config": {"max_new_tokens": 9}}, {"max_output_tokens": 99}, 9, 9),
        ({"override_generation_config": {"max_new_tokens": 200}}, {"max_output_tokens": 99}, 99, 99),
        ({"override_generation_config": {"max_new_tokens": None}}, {"max_output_tokens": 99}, 99, 99),
        ({"generation_config": "elsewhere"}, {"max_output_tokens": 99}, 30, 30),
        ({"generation_config": "elsewhere"}, {"max_output_tokens": 20}, 20, 20),
        ({"generation_config": "vllm"}, {"max_output_tokens": 99}, 99, 99),
        ({}, {"max_output_tokens": 99}, 50, None),
        ({}, {"max_output_tokens": 20}, 20, 20),
    ],
    ids=str,
)
def test_an_answer_is_as_long_as_the_model_says_where_its_request_does_not(
    model, monkeypatch, tmp_path, given, limits, unnamed, most
):
    """And never longer than an operator says, as in vLLM, which takes a directory that he names for that.

    Nor longer than the limit, above which the ingress lets no request name a number.
    """
    directory = Path(model({}))
    (directory / "generation_config.json").write_text(json.dumps({"max_new_tokens": 50}))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(directory, "elsewhere")
    (tmp_path / "elsewhere/generation_config.json").write_text(json.dumps({"max_new_tokens": 30}))
    config = parse({"model": str(directory), "limits": limits, "decode": {"engine_kwargs": given}})
    found = FoundModel.of(config)
    assert (found.sampled_with.get("max_tokens"), found.max_output_tokens) == (unnamed, most)
    of_vllm = AsyncEngineArgs(model=str(directory), **found.sampling).create_model_config()
    assert of_vllm.get_diff_sampling_param().get("max_tokens") == unnamed


def test_an_engine_argument_that_is_null_is_as_if_not_given(model):
    """vLLM itself refuses null for each of these, in a replica."""
    directory = Path(model({}))
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "max_new_tokens": 50}))
    given = dict.fromkeys(("generation_config", "hf_overrides", "override_generation_config"))
    config = parse({"model": str(directory), "decode": {"engine_kwargs": given}})
    found = FoundModel.of(config)
    assert (found.sampled_with, found.max_output_tokens) == ({"temperature": 0.6, "max_tokens": 50}, None)
    of_vllm = AsyncEngineArgs(model=str(directory), **config.decode.engine_kwargs).create_model_config()
    assert of_vllm.get_diff_sampling_param() == found.sampled_with


def gemma3(**text):
    """What a model says whose text is a part of it."""
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "max_position_embeddings": None,
        "text_config": {"model_type": "gemma3_text", **text},
    }


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        (gemma3(max_position_embeddings=131_072, rope_scaling={"type": "linear", "factor": 8.0}), 131_072),
        (gemma3(), None),
    ],
)
def test_the_length_of_a_part_for_text_counts_and_is_unknown_where_it_says_none(model, changes, length):
    assert FoundModel.of(parse({"model": model(changes)})).longest == length


def test_tensor_parallel_degrees_are_held_against_the_part_for_text(model):
    directory = model(gemma3(num_attention_heads=6) | {"num_attention_heads": None})
    with pytest.raises(ConfigError, match="does not divide the model's 6 attention heads"):
        FoundModel.of(parse({"model": directory, "prefill": {"tensor_parallel_size": 4}}))


def heads(attention, kv, **more):
    return {"num_attention_heads": attention, "num_key_value_heads": kv, **more}


@pytest.mark.parametrize(
    ("changes", "degree", "refusal"),
    [
        (heads(28, 4), 8, "8 does not divide the model's 28 attention heads; the nearest that can work is 4"),
        (heads(28, 4), 7, "7 neither divides the model's 4 KV heads nor is a multiple of them; .* is 4"),
        (heads(24, 8), 3, "3 neither divides the model's 8 KV heads nor is a multiple of them; .* is 2"),
        (heads(24, 8), 24, None),
        (heads(28, 4), 4, None),
        (heads(28, 4), 2, None),
        (heads(32, 1), 16, None),
        (heads(24, None), 3, None),
        (heads(24, 8, kv_lora_rank=512), 3, None),
    ],
)
def test_tensor_parallel_degrees_are_those_that_vllm_can_divide_heads_by(model, changes, degree, refusal):
    values = {"model": model(changes), "decode": {"tensor_parallel_size": degree}}
    with contextlib.nullcontext() if refusal is None else pytest.raises(ConfigError, match=refusal):
        FoundModel.of(parse(values))


@pytest.mark.parametrize(
    ("changes", "prefill", "decode", "refusal"),
    [
        (
            heads(12, 2),
            4,
            2,
            "prefill.* .4. is more than .* .2. and .* 2 KV heads, .* at most 2",
        ),
        (heads(12, 1), 4, 1, "decode.tensor_parallel_size .1. and than the model's 1 KV heads,"),
        (heads(12, 2), 4, 4, None),
        (heads(12, 2), 2, 1, None),
        (heads(12, 2), 2, 4, None),
        (heads(12, None), 4, 2, None),
        (heads(12, 2, kv_lora_rank=512), 4, 2, None),
    ],
)
def test_several_workers_of_prefill_have_the_same_kv_heads_only_if_decode_has_as_many_workers(
    model, changes, prefill, decode, refusal
):
    """Else vLLM's NIXL connector refuses each handshake, with an assertion that says nothing."""
    values = {
        "model": model(changes),
        "prefill": {"tensor_parallel_size": prefill},
        "decode": {"tensor_parallel_size": decode},
    }
    with contextlib.nullcontext() if refusal is None else pytest.raises(ConfigError, match=refusal):
        FoundModel.of(parse(values))


def test_a_draft_model_that_names_the_model_to_serve_is_refused_in_its_place(model):
    """Its configuration is not that of the model, nor does ours say that decode speculates."""
    drafts = {"speculators_config": {"verifier": {"name_or_path": "org/model"}}}
    with pytest.raises(ConfigError, match=r"^model: it is a draft model .* speculative_config of both"):
        FoundModel.of(parse({"model": model(drafts)}))


def test_kv_heads_of_mistrals_format_count(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps({"n_heads": 24, "n_kv_heads": 8}))
    (tmp_path / "consolidated.safetensors").touch()
    with pytest.raises(ConfigError, match="3 neither divides the model's 8 KV heads"):
        FoundModel.of(parse({"model": str(tmp_path), "prefill": {"tensor_parallel_size": 3}}))


@pytest.mark.parametrize(
    ("changes", "overrides", "length"),
    [
        ({}, {"rope_parameters": YARN | {"rope_theta": 1e4}}, 8192),
        ({"rope_scaling": YARN}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048),
        ({}, {"max_position_embeddings": 4096}, 4096),
    ],
)
@pytest.mark.parametrize("section", ["prefill", "decode"])
def test_overrides_of_a_models_configuration_count(model, changes, overrides, length, section):
    directory = model(changes)
    options = {"hf_overrides": overrides}
    vllms = AsyncEngineArgs(model=directory, **options).create_model_config()
    values = {"model": directory, section: {"engine_kwargs": options}}
    assert FoundModel.of(parse(values)).longest == vllms.max_model_len == length
    assert FoundModel.of(parse(values | {"max_model_len": length})).longest == length
    with pytest.raises(ConfigError, match="is more than the model's"):
        FoundModel.of(parse(values | {"max_model_len": length + 1}))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_position_embeddings": "32768"}, "max_position_embeddings is '32768'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"max_position_embeddings": True}, "max_position_embeddings is True"),
        ({"max_position_embeddings": [1]}, "max_position_embeddings is .1."),
        ({"n_positions": "2048"}, "n_positions is '2048'"),
        ({"model_max_length": "8192"}, "model_max_length is '8192'"),
        ({"rope_scaling": "yarn"}, "ROPE is 'yarn'"),
        ({"rope_parameters": [1]}, "ROPE is .1."),
        ({"rope_scaling": YARN | {"factor": "4.0"}}, "factor of ROPE is '4.0'"),
        ({"rope_scaling": YARN | {"factor": -1}}, "factor of ROPE is -1"),
        ({"rope_scaling": YARN | {"factor": math.inf}}, "factor of ROPE is inf"),
        ({"rope_scaling": YARN | {"factor": math.nan}}, "factor of ROPE is nan"),
        ({"rope_scaling": YARN | {"factor": 1e-6}}, "no prompt"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": "8192"}},
            "original_max_position_embeddings of ROPE is '8192'",
        ),
        ({"rope_scaling": YARN | {"rope_type": ["yarn"]}}, "rope_type of ROPE is .'yarn'."),
        (
            {"rope_scaling": LONG, "original_max_position_embeddings": "512"},
            "original_max_position_embeddings is '512'",
        ),
        ({"model_type": 7}, "model_type is 7"),
    ],
    ids=str,
)
def test_lengths_that_are_none_are_refused_with_their_key(model, tiny, values, named):
    named = named.replace("ROPE", r"(its )?rope_parameters \(rope_scaling\)")
    with pytest.raises(ConfigError, match=f"^model: .*{named}.*hf_overrides"):
        FoundModel.of(parse({"model": model(values)}))
    options = {"engine_kwargs": {"hf_overrides": values}}
    with pytest.raises(ConfigError, match=named):
        FoundModel.of(parse({"model": str(tiny), "decode": options}))


def test_what_a_configuration_leaves_open_is_no_mistake(model):
    values = {
        "model_type": None,
        "n_positions": None,
        "rope_scaling": {"rope_type": "linear", "factor": None},
        "rope_parameters": None,
    }
    assert FoundModel.of(parse({"model": model(values)})).longest == 2048


def test_overrides_of_a_part_for_text_count(model):
    directory = model(gemma3(max_position_embeddings=4096))
    options = {"hf_overrides": {"text_config": {"max_position_embeddings": 8192}}}
    assert FoundModel.of(parse({"model": directory, "decode": {"engine_kwargs": options}})).longest == 8192


@pytest.mark.parametrize(
    ("params", "length"),
    [
        ({"max_position_embeddings": 4096, "n_heads": 4}, 4096),
        ({"max_position_embeddings": 4096, "yarn": {"factor": 4}}, None),
        ({}, None),
    ],
)
def test_of_mistrals_format_is_known_what_it_says(tmp_path, params, length):
    (tmp_path / "params.json").write_text(json.dumps(params))
    (tmp_path / "consolidated.safetensors").touch()
    assert FoundModel.of(parse({"model": str(tmp_path)})).longest == length


@pytest.mark.parametrize(
    ("text", "why"), [('{"model_type": "lla', "is it whole?"), ("[]", "holds no keys and values")]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path, name, text, why):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"model: .*/{name}") as refused:
        FoundModel.of(parse({"model": str(tmp_path)}))
    assert why in str(refused.value)
