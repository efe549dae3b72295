"""The application builder, as far as it goes without a cluster."""

from pathlib import Path

import pytest

import deployments
from benchmarks.engines.tiny_models import build_tiny_llama
from deployments.config import ConfigError
from deployments.config.settings import load, parse
from slo.tiers import PREMIUM

CONFIGS = sorted((Path(deployments.__file__).parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configurations_that_come_along_are_valid(path):
    assert load(path).tiers.tier_set()[PREMIUM].sheddable is False


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", context=2048))


@pytest.fixture(scope="module")
def build():
    from deployments.app import build

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 4096}, "max_model_len: 4096 is more than the model's 2048"),
        (
            {"prefill": {"tensor_parallel_size": 3}},
            "3 does not divide the model's 4 attention heads",
        ),
        (
            {"decode": {"engine_kwargs": {"max_num_seq": 5}}},
            "decode.engine_kwargs: vLLM has no engine argument 'max_num_seq'; did you mean 'max_num_seqs'?",
        ),
        ({"profile": "/nowhere/profile.json"}, "profile: /nowhere/profile.json cannot be read"),
        ({"api_keys": [{"tenant": "a", "key_env": "NOT_SET"}]}, "from $NOT_SET, which is not set"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(build, tiny, values, message):
    with pytest.raises(ConfigError) as caught:
        build(parse({"model": tiny, **values}))
    assert message in str(caught.value)


@pytest.mark.slow
def test_a_missing_model_directory_is_refused(build):
    with pytest.raises(RuntimeError, match="/no/such/model"):
        build(parse({"model": "/no/such/model"}))


@pytest.mark.slow
def test_serve_gives_the_builder_typed_arguments(build):
    """Serve turns a mapping into the builder's annotated model only if the annotation is a class."""
    import inspect

    from deployments.config.settings import SlackServeConfig

    (parameter,) = inspect.signature(build).parameters.values()
    assert parameter.annotation is SlackServeConfig
