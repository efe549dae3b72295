"""How long a model's prompts may be is what its engines take."""

import json
import shutil

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
