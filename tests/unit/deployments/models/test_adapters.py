import json

import pytest

from deployments.config import ConfigError
from deployments.models.adapters import adapter_kwargs


@pytest.fixture
def saved(tmp_path):
    """The directory of an adapter, of which only its description is there."""

    def save(name, **described):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(described))
        return str(tmp_path / name)

    return save


def test_without_adapters_the_engines_are_started_as_ever():
    assert adapter_kwargs({}, 64, "model") == {}


def test_all_adapters_fit_into_one_pass_and_the_largest_rank_has_room(saved):
    kwargs = adapter_kwargs({"a": saved("a", r=8), "b": saved("b", r=24)}, None, "model")
    assert kwargs["enable_lora"]
    assert (kwargs["max_loras"], kwargs["max_lora_rank"]) == (2, 32)
    assert [(one.name, one.path.rpartition("/")[2]) for one in kwargs["lora_modules"]] == [
        ("a", "a"),
        ("b", "b"),
    ]


@pytest.mark.parametrize(("max_rank", "room"), [(None, 16), (64, 64)])
def test_of_an_adapter_that_is_fetched_the_rank_is_what_one_says(max_rank, room):
    kwargs = adapter_kwargs({"a": "org/a"}, max_rank, "model")
    assert kwargs["max_lora_rank"] == room
    assert kwargs["lora_modules"][0].path == "org/a"


def test_what_cannot_be_an_adapter_is_named(saved, tmp_path):
    with pytest.raises(ConfigError, match="'model' is the name of the model"):
        adapter_kwargs({"model": "org/a"}, None, "model")
    with pytest.raises(ConfigError, match=r"lora.adapters.a: .* has no adapter_config.json"):
        adapter_kwargs({"a": str(tmp_path)}, None, "model")
    with pytest.raises(ConfigError, match=r"lora.adapters.a: .* does not say its rank"):
        adapter_kwargs({"a": saved("a", peft_type="PREFIX_TUNING")}, None, "model")
    with pytest.raises(ConfigError, match=r"lora.adapters.d: .* does not say its rank"):
        adapter_kwargs({"d": saved("d", r="x")}, None, "model")
    with pytest.raises(ConfigError, match=r"lora.max_rank: the rank of 'b' is 32, and room is kept for 16"):
        adapter_kwargs({"b": saved("b", r=32)}, 16, "model")
    with pytest.raises(ConfigError, match=r"lora.adapters.c: its rank is 1024, and vLLM takes at most 512"):
        adapter_kwargs({"c": saved("c", r=1024)}, None, "model")
